#!/usr/bin/env bash
# Trains a model from the beginning, with softmax attention or any other. A training that was stopped goes on.
#
#   bash scripts/pretrain.sh DATA OUT [FLAGS of fairseq-train]
#   bash scripts/pretrain.sh data-bin/help checkpoints/lot --attention lot --lr 0.003 --max-tokens 1024 --max-epoch 4
#
#   DATA   folder of prepare_*.sh or fairseq-preprocess; fairseq-lot check looks at it first
#   OUT    folder for checkpoint_best.pt, checkpoint_last.pt and train.log
#   FLAGS  win over those below
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 2 ] || die "give DATA and OUT, then flags of fairseq-train"
data=$1 out=$2
shift 2
case $(flag lr-scheduler inverse_sqrt "$*") in
    cosine | fixed | inverse_sqrt | polynomial_decay | reduce_lr_on_plateau) warmup=(--warmup-updates 4000) ;;
    *) warmup=() ;; # others have none
esac
activate
train "$data" "$out" --arch lot_transformer_small --attention softmax --lr-scheduler inverse_sqrt --lr 0.0005 \
    "${warmup[@]}" --dropout 0.3 --max-tokens 4096 --max-epoch 25 --seed 1 "$@"
