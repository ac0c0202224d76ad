#!/usr/bin/env bash
# Trains a model from the beginning, with softmax attention or any other. A training that was stopped goes on.
#
#   bash scripts/pretrain.sh DATA OUT [FLAGS of fairseq-train]
#   bash scripts/pretrain.sh data-bin/help checkpoints/lot --attention lot --lr 0.003 --max-tokens 1024 --max-epoch 4
#
#   DATA   folder of prepare_*.sh or fairseq-preprocess; fairseq-lot check looks at it first
#   OUT    folder for checkpoint_best.pt, checkpoint_last.pt and train.log
#   FLAGS  win over the defaults in fairseq_lot/experiment/train.py
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 2 ] || die "give DATA and OUT, then flags of fairseq-train"
activate
exec python -m fairseq_lot.experiment.train pretrain.sh "$@"
