#!/usr/bin/env bash
# Swaps the attention of a pretrained checkpoint: the column "plug-and-play" of the result table.
#
#   BASE         pretrained checkpoint, ours or any fairseq transformer*
#   ATTENTION    softmax, sinkhorn, esp, lot or set
#   OPTIONS      flat options of the mechanism, e.g. "--lot-num-pivots 64"
#   CALIBRATE    what to fit the mechanism's own parameters on: pieces (random ones, no data needed), text (the
#                training sources of DATA) or no (they stay as drawn)
#   CALIBRATE_OPTIONS  options of the fit, e.g. "--steps 400 --joint-steps 200"
#   DATA         folder made by prepare_*.sh, or by fairseq-preprocess alone
#   OUT          the new checkpoint
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
source scripts/lib/data.sh
source scripts/lib/settings.sh

check_settings
ATTENTION=${ATTENTION:-lot}
OPTIONS=${OPTIONS:-}
CALIBRATE=${CALIBRATE:-pieces}
CALIBRATE_OPTIONS=${CALIBRATE_OPTIONS:-}
DATA=${DATA:-$IWSLT14}
[ -n "${BASE:-}" ] || die "BASE is not set; give the pretrained checkpoint"
OUT=${OUT:-${BASE%.pt}.$ATTENTION.pt}

settings="$ATTENTION $(label)"
same_settings "$OUT" "$settings"
if [ -f "$OUT" ] && [ ! "$BASE" -nt "$OUT" ]; then
    echo "$OUT exists; remove it to swap again"
    exit 0
fi
activate
read -ra options <<<"$OPTIONS"
read -ra fit <<<"$CALIBRATE_OPTIONS"
case $CALIBRATE in
    pieces) ;;
    text) fit+=(--calibrate "$DATA") ;;
    no) fit=(--no-calibrate) ;;
esac
put "$settings" "$OUT.settings"
fairseq-lot swap --path "$BASE" --attention "$ATTENTION" ${options[@]+"${options[@]}"} \
    ${fit[@]+"${fit[@]}"} --out "$OUT"
