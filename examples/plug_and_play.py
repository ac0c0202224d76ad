"""Swap the attention of a trained model, translate with it, and look at one head.

After ``bash scripts/quickstart.sh``, with the arguments that are the defaults here:

    python examples/plug_and_play.py checkpoints/quickstart/seed1/transformer/base/checkpoint_best.pt data-bin/help
"""

import argparse

import fairseq_lot
from fairseq_lot.inspection.capture import capture


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="checkpoints/quickstart/seed1/transformer/base/checkpoint_best.pt")
    parser.add_argument("data", nargs="?", default="data-bin/help")
    parser.add_argument("--sentence", default="Der alte Mann liest ein Buch.")
    parser.add_argument("--steps", type=int, default=800, help="of the calibration (default: %(default)s)")
    args = parser.parse_args(argv)

    # near_far in the encoder, fitted to softmax's outputs on random pieces; everything else is the base's, bit for bit.
    # attention="lot" and so on plug in others
    swapped = fairseq_lot.swap(args.base, steps=args.steps, joint_steps=args.steps // 2)
    print(f"predictions change by {swapped.model_args.swap_cost:.4f} nats a piece")

    for name, checkpoint in (("softmax", args.base), ("near_far", swapped)):
        model = fairseq_lot.Translator(checkpoint, args.data)
        with capture(model.loaded.model) as seen:
            translation = model.translate([args.sentence])[0]
        first = next(attention for attention in seen if attention.site == "encoder")
        weights = first.weights[0, 0]  # A of the first head: (queries, keys)
        print(f"{name}: {translation}")
        print(f"  each key receives {' '.join(f'{mass:.2f}' for mass in weights.sum(0).tolist())}")


if __name__ == "__main__":
    main()
