"""A trained model with near_far attention in its encoder: how many translations change, and what a long document costs.

After ``bash scripts/quickstart.sh``, with the arguments that are the defaults here:

    python examples/near_far.py checkpoints/quickstart/seed1/transformer/base/checkpoint_best.pt data-bin/help
"""

import argparse
import sys
import time
from pathlib import Path

import torch

import fairseq_lot
from fairseq_lot.pretrained.loading import load
from fairseq_lot.pretrained.translate import translate_split

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.measure import peak_memory


@torch.no_grad()
def encode(model, tokens):
    """Seconds of one pass through the encoder, and MiB of tensors that were alive at once in another."""
    document = torch.randint(4, len(model.encoder.dictionary), (1, tokens))
    model.encoder(document[:, :64], src_lengths=torch.tensor([64]))
    started = time.perf_counter()
    model.encoder(document, src_lengths=torch.tensor([tokens]))
    seconds = time.perf_counter() - started
    memory = peak_memory(lambda: model.encoder(document, src_lengths=torch.tensor([tokens])), document.device)
    return seconds, memory / 2**20


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="checkpoints/quickstart/seed1/transformer/base/checkpoint_best.pt")
    parser.add_argument("data", nargs="?", default="data-bin/help")
    parser.add_argument("--tokens", type=int, default=4000, help="of the document (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="of the calibration (default: %(default)s)")
    args = parser.parse_args(argv)

    base = load(args.base, args.data, "test")
    # near_far in the encoder, fitted to softmax on random pieces; everything else is the base's, bit for bit
    swapped = fairseq_lot.swap(args.base, steps=args.steps, joint_steps=args.steps // 2)

    models = {"near_far": load(swapped, args.data, "test"), "softmax": base}
    translations = {name: translate_split(loaded, beam=5) for name, loaded in models.items()}
    same = sum(ours == theirs for ours, theirs in zip(*translations.values(), strict=True))
    print(f"{same} of {len(translations['softmax'])} translations of the test set are the same")
    print(f"a document of {args.tokens} pieces through the encoder:")
    for name, loaded in models.items():
        seconds, mebibytes = encode(loaded.model.cpu(), args.tokens)
        print(f"  {name}: {seconds:.2f} s, {mebibytes:.0f} MiB")


if __name__ == "__main__":
    main()
