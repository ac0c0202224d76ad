#!/usr/bin/env bash
# Fine-tunes a swapped checkpoint, or the base itself as the control. A training that was stopped goes on.
#
#   bash scripts/finetune.sh SWAPPED.pt DATA OUT [FLAGS of fairseq-train]
#   bash scripts/finetune.sh lot.pt data-bin/help checkpoints/tuned --lr 0.0003 --max-epoch 1
#
#   SWAPPED.pt  of fairseq-lot swap; its attention, with options and sites, and its sizes come with it
#   DATA        folder of prepare_*.sh or fairseq-preprocess
#   OUT         folder for checkpoint_best.pt, checkpoint_last.pt and train.log
#   FLAGS       win over those below
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 3 ] || die "give SWAPPED.pt, DATA and OUT, then flags of fairseq-train"
swapped=$1 data=$2 out=$3
shift 3
[ -f "$swapped" ] || die "there is no checkpoint $swapped; make it with fairseq-lot swap"
start=$(stat -Lc '%s %y' "$swapped")
if begun "$out" && [ -f "$out/start" ] && [ "$(cat "$out/start")" != "$start" ]; then
    die "$out was trained from another $swapped; remove it to train again"
fi
activate
train "$data" "$out" --arch pluggable_transformer --finetune-from-model "$swapped" --lr-scheduler fixed --lr 0.00005 \
    --dropout 0.3 --max-tokens 4096 --max-epoch 10 --seed 1 "$@"
