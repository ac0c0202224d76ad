#!/usr/bin/env bash
# Swaps the attention of a pretrained checkpoint: the column "plug-and-play" of the result table.
#
#   BASE         pretrained checkpoint, ours or any fairseq transformer*
#   ATTENTION    softmax, sinkhorn, esp or lot
#   OPTIONS      flat options of the mechanism, e.g. "--lot-num-pivots 64"
#   CALIBRATE    yes: fit what the mechanism added to the training sources of DATA; empty: leave it as it is
#   DATA         folder made by prepare_*.sh
#   OUT          the new checkpoint
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ATTENTION=${ATTENTION:-lot}
OPTIONS=${OPTIONS:-}
CALIBRATE=${CALIBRATE:-}
DATA=${DATA:-data-bin/iwslt14.de-en}
[ -n "${BASE:-}" ] || die "BASE is not set; give the pretrained checkpoint"
OUT=${OUT:-${BASE%.pt}.$ATTENTION.pt}

settings="$ATTENTION $OPTIONS ${CALIBRATE:+--calibrate}"
same_settings "$OUT" "$settings"
if [ -f "$OUT" ] && [ ! "$BASE" -nt "$OUT" ]; then
    echo "$OUT exists; remove it to swap again"
    exit 0
fi
activate
read -ra options <<<"$OPTIONS"
fairseq-lot swap --path "$BASE" --attention "$ATTENTION" ${options[@]+"${options[@]}"} \
    ${CALIBRATE:+--calibrate "$DATA"} --out "$OUT"
echo "$settings" >"$OUT.settings"
