"""``fairseq-lot check``: find out in seconds what would stop a long run halfway."""

from argparse import ArgumentParser, Namespace

from fairseq_lot.errors import check_least
from fairseq_lot.pretrained.data_folder import check_data, check_lengths
from fairseq_lot.pretrained.languages import add_language_arguments, languages, typed_pair
from fairseq_lot.pretrained.loading import load


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    parser.add_argument("--path", metavar="CKPT.pt", help="checkpoint to translate or to train on it, in its direction")
    parser.add_argument("--split", default="test", help="train, valid or test (default: %(default)s)")
    for side in ("source", "target"):
        text = f"longest {side} that may be, in pieces with its end (default: the checkpoint's)"
        parser.add_argument(f"--max-{side}-positions", type=int, metavar="N", help=text)
    add_language_arguments(parser)


def run(args: Namespace) -> None:
    """Check; print one line when all is well."""
    check_least(args, max_source_positions=1, max_target_positions=1)
    pair, limits = typed_pair(args), [args.max_source_positions, args.max_target_positions]
    if args.path is None:
        source, target = pair or languages({}, args.data, None)
        sizes = list(check_data(args.data, split=args.split, source=source, target=target).values())
    else:
        loaded = load(args.path, args.data, args.split, device="cpu", pair=pair)
        sizes = [loaded.sentences.src_sizes, loaded.sentences.tgt_sizes]
        limits = [typed or own for typed, own in zip(limits, loaded.model.max_positions(), strict=True)]
    longest = []
    for side, lengths, limit in zip(("source", "target"), sizes, limits, strict=True):
        check_lengths(lengths, limit, where=f"{args.data}, split {args.split}", side=side)
        longest.append(f"{lengths.max() - 1} pieces ({side})")
    print(f"{args.data}: {args.split} has {len(sizes[0])} sentences, the longest {' and '.join(longest)}")
