"""Time one attention layer of every mechanism, forward and backward, as ratios to softmax in one run.

OMP_NUM_THREADS=1 python benchmarks/attention.py --sentences 112 --tokens 30 --heads 4 --head-dim 32
"""

import argparse
import platform
import statistics
import time

import torch

from fairseq_lot.attention.registry import MECHANISMS, build_mechanism
from fairseq_lot.evaluation.score import current_commit


def measure(mechanism, inputs, gradient, *, warm_up, repeats):
    """Median seconds of the forward and of the backward pass."""
    forward, backward = [], []
    for _ in range(warm_up + repeats):
        start = time.perf_counter()
        values = mechanism(*inputs).values
        middle = time.perf_counter()
        values.backward(gradient)
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    return statistics.median(forward[warm_up:]), statistics.median(backward[warm_up:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sentences", 112), ("tokens", 30), ("heads", 4), ("head-dim", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=7, help="default: %(default)s")
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = (args.sentences, args.heads, args.tokens, args.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape)
    padding = torch.zeros(args.sentences, args.tokens, dtype=torch.bool)
    padding[: args.sentences // 6, -args.tokens // 6 :] = True  # one sentence in six is a sixth shorter
    print(
        f"{platform.machine()} CPU, torch {torch.__version__}, {torch.get_num_threads()} thread(s), "
        f"commit {current_commit()}, float32, (sentences, heads, tokens, head_dim) = {shape}, "
        f"warm-up {args.warm_up}, median of {args.repeats}\n"
    )
    print("| mechanism, default options | forward ÷ softmax | backward ÷ softmax | forward | backward |")
    print("| --- | --- | --- | --- | --- |")
    base = None
    for name in ["softmax", *(name for name in MECHANISMS if name != "softmax")]:
        mechanism = build_mechanism(name, num_heads=args.heads, head_dim=args.head_dim)
        times = measure(mechanism, (q, k, v, padding, padding), gradient, warm_up=args.warm_up, repeats=args.repeats)
        base = base or times
        ratios = " | ".join(f"{t / b:.1f}" for t, b in zip(times, base, strict=True))
        print(f"| {name} | {ratios} | {' | '.join(f'{1000 * t:.1f} ms' for t in times)} |")


if __name__ == "__main__":
    main()
