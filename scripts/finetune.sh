#!/usr/bin/env bash
# Fine-tunes a swapped checkpoint, or the base itself as the control. A training that was stopped goes on.
#
#   bash scripts/finetune.sh SWAPPED.pt DATA OUT [FLAGS of fairseq-train]
#   bash scripts/finetune.sh lot.pt data-bin/help checkpoints/tuned --lr 0.0003 --max-epoch 1
#
#   SWAPPED.pt  of fairseq-lot swap; its attention, with options and sites, and its sizes come with it
#   DATA        folder of prepare_*.sh or fairseq-preprocess
#   OUT         folder for checkpoint_best.pt, checkpoint_last.pt and train.log
#   FLAGS       win over the defaults in fairseq_lot/experiment/train.py
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 3 ] || die "give SWAPPED.pt, DATA and OUT, then flags of fairseq-train"
activate
exec python -m fairseq_lot.experiment.train finetune.sh "$@"
