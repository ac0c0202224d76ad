#!/usr/bin/env bash
# Makes the page of an experiment that has run: its table, its training curves, and attention maps of three sentences.
#
#   bash scripts/report.sh DATA WORK BASE.pt SWAPPED.pt...
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

data=$1 work=$2
shift 2
activate
text=("$data"/text/test.*)
head -n 3 "${text[0]}" >"$work/sentences.txt"
mapfile -t logs < <(find "$work" -name train.log | sort)
fairseq-lot report --results "$work/results.jsonl" --logs "${logs[@]}" --path "$1" --compare "${@:2}" \
    --sentences "$work/sentences.txt" --tokenised --data "$data" --out "$work/report.html"
