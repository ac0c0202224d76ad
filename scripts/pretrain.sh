#!/usr/bin/env bash
# Trains a model from scratch, with softmax attention or any other. A stopped training resumes.
#
#   bash scripts/pretrain.sh DATA OUT [FLAGS of fairseq-train]
#   bash scripts/pretrain.sh data-bin/help checkpoints/lot --attention lot --lr 0.003 --max-tokens 1024 --max-epoch 4
#
#   DATA   folder made by prepare_*.sh or fairseq-preprocess; fairseq-lot check tests it first
#   OUT    folder for checkpoint_best.pt, checkpoint_last.pt and train.log
#   FLAGS  override the defaults in fairseq_lot/experiment/train.py
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 2 ] || die "give DATA and OUT, then flags of fairseq-train"
activate
exec python -m fairseq_lot.experiment.train pretrain.sh "$@"
