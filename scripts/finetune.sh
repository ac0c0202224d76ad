#!/usr/bin/env bash
# Fine-tunes a swapped checkpoint, or the base itself as the control. A stopped training resumes.
#
#   bash scripts/finetune.sh SWAPPED.pt DATA OUT [FLAGS of fairseq-train]
#   bash scripts/finetune.sh lot.pt data-bin/help checkpoints/tuned --lr 0.0003 --max-epoch 1
#
#   SWAPPED.pt  made by fairseq-lot swap; it gives the attention, its options and sites, and the sizes
#   DATA        folder made by prepare_*.sh or fairseq-preprocess
#   OUT         folder for checkpoint_best.pt, checkpoint_last.pt and train.log
#   FLAGS       override the defaults in fairseq_lot/experiment/train.py
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 3 ] || die "give SWAPPED.pt, DATA and OUT, then flags of fairseq-train"
activate
exec python -m fairseq_lot.experiment.train finetune.sh "$@"
