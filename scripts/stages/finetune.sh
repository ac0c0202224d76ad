#!/usr/bin/env bash
# Fine-tunes a swapped checkpoint: the column "fine-tuned" of the result table.
# With PROTOCOL=papers the learning rate is a tenth of pretraining's, with pretraining's warm-up and inverse square root,
# as in ESPFormer's appendix C.4; with PROTOCOL=quick it is the same tenth, and constant.
#
#   SWAPPED      checkpoint made by plug_and_play.sh (or the base itself, for the control)
#   ATTENTION    its mechanism, and OPTIONS, as given to plug_and_play.sh
#   DATA, SRC, TGT, BACKBONE, SIZE, SEED, PRECISION, DEVICE, GPUS: as for pretrain.sh
#   PROTOCOL     papers or quick; FINETUNE_EPOCHS, FINETUNE_LR, FINETUNE_SCHEDULE, WARMUP, DROPOUT, MAX_TOKENS,
#                LAMBDA_INIT and BEST, which it sets, are in lib/protocols.sh
#   CHECKED      yes: that DATA and SWAPPED fit together is known, and not looked at again
#   SAVE         folder for the checkpoints; a run that was stopped goes on from its last one
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
source scripts/lib/data.sh
source scripts/lib/settings.sh
source scripts/lib/protocols.sh
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
use_protocol
protocol_flags "$BACKBONE" "$DATA"
schedule=(--lr-scheduler "$FINETUNE_SCHEDULE" --lr "$FINETUNE_LR")
[ "$FINETUNE_SCHEDULE" = fixed ] || schedule+=(--warmup-updates "$WARMUP")

activate
read -ra options <<<"$OPTIONS"
if [ -f "$SAVE.settings" ] && [ -e "$SAVE" ] && [ "$SWAPPED" -nt "$SAVE.settings" ]; then
    die "$SAVE was trained from an earlier $SWAPPED; remove it to train again"
fi
[ -f "$SAVE/finished" ] || check_data "$DATA" --split train --path "$SWAPPED"
train_once "$SAVE" "$DATA" \
    --arch "$(architecture "$BACKBONE" "$SIZE")" --attention "$ATTENTION" ${options[@]+"${options[@]}"} \
    --finetune-from-model "$SWAPPED" \
    "${schedule[@]}" \
    --dropout "$DROPOUT" --max-tokens "$MAX_TOKENS" \
    --max-epoch "$FINETUNE_EPOCHS" --seed "$SEED" ${PROTOCOL_FLAGS[@]+"${PROTOCOL_FLAGS[@]}"}
