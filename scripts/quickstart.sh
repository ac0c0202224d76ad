#!/usr/bin/env bash
# From a bare machine to a result table and a report page: sets up, then runs the whole experiment on the embedded
# synthetic corpus. At most five minutes on two CPU cores after set-up; a second call goes on where the first stopped.
#
#   BACKBONES    transformer; "transformer diff_transformer" for both
#   MECHANISMS   "lot:calibrated esp lot sinkhorn softmax": what takes longest first, so that it is not left alone
#   JOBS         how many run side by side (one for each core, by nproc)
#   WORK         folder for checkpoints, results, logs and the report
#   SEED, and the other variables of reproduce_table.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/settings.sh

check_settings
bash scripts/setup.sh
activate
bash scripts/prepare_synthetic.sh

export DATA=data-bin/synthetic SIZE=small
export EPOCHS=${EPOCHS:-4} MAX_TOKENS=${MAX_TOKENS:-1024} WARMUP=${WARMUP:-200}
export FINETUNE_EPOCHS=${FINETUNE_EPOCHS:-1}
# a quarter of the axes, and of the steps: ESP and the fit would otherwise take half of the time of everything together
export ESP_OPTIONS=${ESP_OPTIONS:---esp-num-slices 8}
export CALIBRATE_OPTIONS=${CALIBRATE_OPTIONS:---steps 400 --joint-steps 200}
# one thread each: two were ten times slower on cores that others used as well
JOBS=${JOBS:-$(nproc)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
BACKBONES=${BACKBONES:-transformer}
MECHANISMS=${MECHANISMS:-lot:calibrated esp lot sinkhorn softmax}
WORK=${WORK:-checkpoints/quickstart}
RESULTS=${RESULTS:-$WORK/results.jsonl}
source scripts/reproduce_table.sh

report=$WORK/report.html
if [ ! "$report" -nt "$RESULTS" ]; then
    models=("$WORK/${BACKBONES%% *}"/*/swapped.pt)
    if [ -f "${models[0]}" ]; then models=(--compare "${models[@]}"); else models=(); fi
    head -n 3 "$DATA/text/test.$SRC" >"$WORK/sentences.$SRC"
    fairseq-lot report --results "$RESULTS" --logs "$WORK"/*/*/train.log "$WORK"/*/*/*/train.log \
        --path "$WORK/${BACKBONES%% *}/base/checkpoint_best.pt" ${models[@]+"${models[@]}"} \
        --sentences "$WORK/sentences.$SRC" --tokenised --data "$DATA" --out "$report"
fi
echo
echo "The report, with curves and attention maps: $report"
echo "Next, type sentences and see what each model makes of them:"
echo "    source ${VIRTUAL_ENV#"$PWD/"}/bin/activate"
echo "    fairseq-lot translate --path $WORK/${BACKBONES%% *}/base/checkpoint_best.pt"
