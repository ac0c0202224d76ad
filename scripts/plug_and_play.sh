#!/usr/bin/env bash
# Swaps the attention of a pretrained checkpoint, and fits what the new attention adds.
#
#   bash scripts/plug_and_play.sh BASE.pt OUT.pt [FLAGS of fairseq-lot swap]
#   bash scripts/plug_and_play.sh base/checkpoint_best.pt lot.pt --attention lot --lot-num-pivots 64
#
#   BASE.pt  ours or any fairseq transformer*
#   OUT.pt   the new checkpoint, whole or absent
#   FLAGS    fitted on random pieces; --calibrate DATA fits on its text, --no-calibrate leaves parameters as drawn;
#            softmax stays where a swap costs too much, unless --budget none
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 2 ] || die "give BASE.pt and OUT.pt, then flags of fairseq-lot swap"
activate
exec fairseq-lot swap --path "$1" --out "$2" "${@:3}"
