#!/usr/bin/env bash
# Swaps other attention into a trained model, scores each swapped model on the test set, tests whether it differs from
# the trained model, and prints the table. A second call resumes and adds new ways.
#
#   bash scripts/plug_and_play.sh BASE.pt DATA [--try WAY]... [FLAGS of fairseq-lot sweep]
#   bash scripts/plug_and_play.sh base/checkpoint_best.pt data-bin/help --try 'lot --lot-num-pivots 64'
#
#   BASE.pt  ours or any fairseq transformer*, trained with softmax
#   DATA     folder made by prepare_*.sh or fairseq-preprocess
#   WAY      a mechanism with its options; default: Sinkhorn twice, ESP, LOT and near_far (fairseq-lot sweep --help)
#   FLAGS    such as --out FOLDER for tables and figures; default: BASE.sweep, beside BASE.pt
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 2 ] || die "give BASE.pt and DATA, then flags of fairseq-lot sweep"
activate
exec fairseq-lot sweep "$2" --path "$1" "${@:3}"
