"""What the swaps of an experiment cost, as its checkpoints keep it: nats a piece by system.

python results/log/costs.py checkpoints/iwslt14-65k-medium/seed1/transformer >results/iwslt14-65k-medium.costs.json
"""

import argparse
import json
from pathlib import Path

from fairseq_lot.pretrained.checkpoint import load_checkpoint


def costs(folder):
    """The cost of each FOLDER/SYSTEM/swapped.pt, by system, in the order of their names."""
    paths = sorted(folder.glob("*/swapped.pt"))
    return {path.parent.name: load_checkpoint(path).model_args.swap_cost for path in paths}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="WORK/seedN/BACKBONE of an experiment")
    found = costs(parser.parse_args().folder)
    print(json.dumps({system: round(cost, 4) for system, cost in found.items()}, ensure_ascii=False, indent=1))
