#!/usr/bin/env bash
# Fine-tunes a swapped checkpoint: the column "fine-tuned" of the result table.
# The learning rate is a tenth of pretraining's and constant, as in ESPFormer's appendix C.4.
#
#   SWAPPED      checkpoint made by plug_and_play.sh (or the base itself, for the control)
#   ATTENTION    its mechanism, and OPTIONS, as given to plug_and_play.sh
#   DATA, SRC, TGT, BACKBONE, SIZE, SEED, MAX_TOKENS, PRECISION, DEVICE, GPUS: as for pretrain.sh
#   CHECKED      yes: that DATA and SWAPPED fit together is known, and not looked at again
#   SAVE         folder for the checkpoints; a run that was stopped goes on from its last one
#   EPOCHS, LR, DROPOUT
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
source scripts/lib/data.sh
source scripts/lib/settings.sh
source scripts/lib/training.sh

check_settings
[ -n "${SWAPPED:-}" ] || die "SWAPPED is not set; give the checkpoint to fine-tune"
ATTENTION=${ATTENTION:-lot}
OPTIONS=${OPTIONS:-}
DATA=${DATA:-$IWSLT14}
BACKBONE=${BACKBONE:-transformer}
SIZE=${SIZE:-iwslt_de_en}
SEED=${SEED:-1}
SAVE=${SAVE:-$(dirname "$SWAPPED")/$ATTENTION-finetuned}
if [ "$SIZE" = small ]; then
    EPOCHS=${EPOCHS:-2} LR=${LR:-3e-4} DROPOUT=${DROPOUT:-0.1}
else
    EPOCHS=${EPOCHS:-10} LR=${LR:-5e-5} DROPOUT=${DROPOUT:-0.3}
fi
MAX_TOKENS=${MAX_TOKENS:-4096}

activate
read -ra options <<<"$OPTIONS"
if [ -f "$SAVE.settings" ] && [ -e "$SAVE" ] && [ "$SWAPPED" -nt "$SAVE.settings" ]; then
    die "$SAVE was trained from an earlier $SWAPPED; remove it to train again"
fi
[ -f "$SAVE/finished" ] || check_data "$DATA" --split train --path "$SWAPPED"
train_once "$SAVE" "$DATA" \
    --arch "$(architecture "$BACKBONE" "$SIZE")" --attention "$ATTENTION" ${options[@]+"${options[@]}"} \
    --finetune-from-model "$SWAPPED" \
    --lr-scheduler fixed --lr "$LR" \
    --dropout "$DROPOUT" --max-tokens "$MAX_TOKENS" \
    --max-epoch "$EPOCHS" --seed "$SEED"
