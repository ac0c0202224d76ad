#!/usr/bin/env bash
# From a bare machine to a result table: sets up, runs the whole experiment on the embedded synthetic corpus, prints the
# table. Ten minutes on two CPU cores after set-up; a second call starts where the first one stopped.
#
#   BACKBONES, MECHANISMS, SEED, and the other variables of reproduce_table.sh
#   WORK         folder for checkpoints, results and the log of each backbone
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bash scripts/setup.sh
activate
bash scripts/prepare_synthetic.sh

export DATA=data-bin/synthetic SIZE=small
export WORK=${WORK:-checkpoints/quickstart}
export RESULTS=${RESULTS:-$WORK/results.jsonl}
export EPOCHS=${EPOCHS:-6} MAX_TOKENS=${MAX_TOKENS:-2048} WARMUP=${WARMUP:-300}
export FINETUNE_EPOCHS=${FINETUNE_EPOCHS:-1}
# a quarter of the axes: ESP would otherwise take a third of the time of everything together
export ESP_OPTIONS=${ESP_OPTIONS:---esp-num-slices 8}
BACKBONES=${BACKBONES:-transformer diff_transformer}
mkdir -p "$WORK"

# One process and one thread per backbone: two small models side by side are faster than one on two cores.
export OMP_NUM_THREADS=1
runs=()
trap 'kill "${runs[@]}" 2>/dev/null' INT TERM
for backbone in $BACKBONES; do
    : >"$WORK/$backbone.log"
    BACKBONES=$backbone bash scripts/reproduce_table.sh >>"$WORK/$backbone.log" \
        2> >(tee -a "$WORK/$backbone.log" | grep --line-buffered '^==\|error' >&2) &
    runs+=($!)
done
for run in "${runs[@]}"; do
    wait "$run" || die "the experiment stopped; see $WORK/*.log, then call this again to go on"
done
fairseq-lot table "$RESULTS"
