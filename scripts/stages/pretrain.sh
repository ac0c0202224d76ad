#!/usr/bin/env bash
# Trains the base of one backbone, with softmax attention: the column "base" of the result table.
#
#   DATA         folder made by prepare_*.sh, or by fairseq-preprocess alone (IWSLT'14)
#   SRC, TGT     languages; needed only where DATA has several pairs
#   BACKBONE     transformer or diff_transformer
#   SIZE         iwslt_de_en (6+6 layers of width 512) or small (3+3 of width 128)
#   SAVE         folder for the checkpoints; a run that was stopped goes on from its last one
#   PROTOCOL     papers or quick; EPOCHS, PATIENCE, LR, WARMUP, DROPOUT, MAX_TOKENS, LAMBDA_INIT and BEST, which it
#                sets, are in lib/protocols.sh
#   SEED
#   PRECISION    fp32, fp16 or bf16; DEVICE: cpu or cuda (both chosen by themselves)
#   GPUS         how many train together (1); each takes MAX_TOKENS, so n of them make n times the batch
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
source scripts/lib/data.sh
source scripts/lib/settings.sh
source scripts/lib/protocols.sh
source scripts/lib/training.sh

check_settings
DATA=${DATA:-$IWSLT14}
BACKBONE=${BACKBONE:-transformer}
SIZE=${SIZE:-iwslt_de_en}
SEED=${SEED:-1}
SAVE=${SAVE:-checkpoints/$(basename "$DATA").$SIZE.seed$SEED/$BACKBONE/base}
use_protocol
protocol_flags "$BACKBONE" "$DATA"
[ "$PATIENCE" = none ] || PROTOCOL_FLAGS+=(--patience "$PATIENCE")

activate
[ -f "$SAVE/finished" ] || check_data "$DATA" --split train
train_once "$SAVE" "$DATA" \
    --arch "$(architecture "$BACKBONE" "$SIZE")" --attention softmax \
    --lr-scheduler inverse_sqrt --lr "$LR" --warmup-updates "$WARMUP" \
    --dropout "$DROPOUT" --max-tokens "$MAX_TOKENS" \
    --max-epoch "$EPOCHS" --seed "$SEED" ${PROTOCOL_FLAGS[@]+"${PROTOCOL_FLAGS[@]}"}
