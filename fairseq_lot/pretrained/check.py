"""``fairseq-lot check``: find out in seconds what would stop a long run halfway."""

from argparse import ArgumentParser, Namespace

from fairseq_lot.pretrained.data_folder import check_data, check_lengths
from fairseq_lot.pretrained.languages import add_language_arguments, languages, typed_pair
from fairseq_lot.pretrained.loading import load


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    parser.add_argument("--path", metavar="CKPT.pt", help="checkpoint that is to translate or be trained on it")
    parser.add_argument("--split", default="test", help="train, valid or test (default: %(default)s)")
    add_language_arguments(parser)


def run(args: Namespace) -> int:
    """Check; print one line when all is well."""
    pair = typed_pair(args)
    if args.path is None:
        source, target = pair or languages({}, args.data, None)
        sizes, limit = check_data(args.data, split=args.split, source=source, target=target), None
    else:
        loaded = load(args.path, args.data, args.split, device="cpu", pair=pair)
        sizes, limit = loaded.sentences.src_sizes, loaded.model.max_positions()[0]
    check_lengths(sizes, limit, where=f"{args.data}, split {args.split}, source side")
    print(f"{args.data}: {args.split} has {len(sizes)} sentences, the longest source has {sizes.max() - 1} pieces")
    return 0
