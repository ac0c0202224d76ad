#!/usr/bin/env bash
# A day on a machine with a GPU, detached from the terminal: the smoke test, attention and whole models over lengths,
# and the result table. A stage that is finished is not run again; the table goes on where it was stopped.
#
#   day.sh [start]     start it, or go on; it outlives the terminal
#   day.sh status      how far it is
#   day.sh stop        end it
#   day.sh STAGE       run one stage here and now, even if it is finished
#
#   STAGES       "smoke kernels models table"; if the smoke test fails, nothing else is run
#   DEVICE       cuda or cpu (chosen by itself)
#   LENGTHS      "32 128 256 512 1024 2048 4096 8192 16384", tokens of a sentence
#   TOKENS       "4096 32768", tokens of a batch
#   DATA, SIZE   data-bin/iwslt14-65k, iwslt_de_en; and the other variables of reproduce_table.sh
#   WORK         folder for everything (checkpoints/gpu-day)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
source scripts/lib/data.sh
source scripts/lib/settings.sh
source scripts/lib/training.sh

check_settings
STAGES=${STAGES:-smoke kernels models table}
for stage in $STAGES; do one_of STAGES "$stage" smoke kernels models table; done
LENGTHS=${LENGTHS:-32 128 256 512 1024 2048 4096 8192 16384}
TOKENS=${TOKENS:-4096 32768}
export DATA=${DATA:-data-bin/iwslt14-65k} SIZE=${SIZE:-iwslt_de_en}
WORK=${WORK:-checkpoints/gpu-day}

# smoke: mechanisms and kernels against float64.
smoke() {
    python scripts/gpu/smoke.py --device "$DEVICE"
}

# kernels: one layer, by our kernels and without them, against torch's own attention by each of its kernels.
kernels() {
    local tokens folder=scripts/gpu/peers peers=()
    peers+=(--peer "plain-lot=$folder/plain_lot" --peer "flash=$folder/flash")
    if [ "$DEVICE" = cuda ]; then peers+=(--peer "efficient=$folder/efficient"); fi
    for tokens in $TOKENS; do
        python -m benchmarks --out "$WORK/kernels-$tokens" --tokens "$tokens" --lengths $LENGTHS \
            --device "$DEVICE" --dtype "$DTYPE" "${peers[@]}"
    done
}

# models: the whole model, training and decoding.
models() {
    local tokens
    for tokens in $TOKENS; do
        python -m benchmarks --model "lot_transformer_$SIZE" --out "$WORK/models-$tokens" --tokens "$tokens" \
            --lengths $LENGTHS --device "$DEVICE" --dtype "$DTYPE"
    done
}

# table: all backbones and mechanisms, trained and scored.
table() {
    local work=$WORK
    WORK=$work/table RESULTS=$work/results.jsonl bash scripts/reproduce_table.sh
}

# at_work: a day is running.
at_work() {
    ! flock --nonblock "$WORK/.lock" true
}

# say WORDS: one line with the time.
say() {
    echo "$(date '+%F %T') $*"
}

# run_all: every stage that is not finished, each with a log of its own.
run_all() {
    local stage failed=() began
    for stage in $STAGES; do
        if [ -f "$WORK/$stage.done" ]; then
            say "$stage: finished before; remove $WORK/$stage.done to run it again"
            continue
        fi
        say "$stage: begun"
        began=$SECONDS
        if bash scripts/gpu/day.sh "$stage" >"$WORK/$stage.log" 2>&1; then
            touch "$WORK/$stage.done"
            say "$stage: finished after $((SECONDS - began)) s"
        else
            failed+=("$stage")
            say "$stage: failed: $(grep . "$WORK/$stage.log" | tail -n 1) (whole log: $WORK/$stage.log)"
            [ "$stage" != smoke ] || break
        fi
    done
    say "the end${failed[*]:+; failed: ${failed[*]}; mend it, then the same call goes on from here}"
    [ ${#failed[@]} -eq 0 ]
}

mkdir -p "$WORK" 2>/dev/null || die "cannot write in $WORK; give another WORK"
touch "$WORK/.lock"
case ${1:-start} in
    status)
        if at_work; then echo "at work, process $(cat "$WORK/pid")"; else echo "not at work"; fi
        tail -n 20 "$WORK/day.log" 2>/dev/null || true
        newest=$(find "$WORK" -name '*.log' ! -name day.log -size +0 -printf '%T@ %p\n' | sort -n | tail -n 1)
        if [ -n "$newest" ]; then echo "${newest#* }:" && tail -n 3 "${newest#* }"; fi
        exit 0
        ;;
    stop)
        at_work || die "no day is at work in $WORK"
        kill -TERM -- "-$(cat "$WORK/pid")"
        exit 0
        ;;
esac

activate
device_flags
export DEVICE PRECISION WORK LENGTHS TOKENS STAGES
if [ "$DEVICE" = cuda ]; then DTYPE=float16; else DTYPE=float32; fi
case ${1:-start} in
    start)
        ! at_work || die "a day is at work in $WORK already; see 'day.sh status'"
        [[ $STAGES != *table* ]] || find_languages "$DATA" # it is a data folder
        setsid bash scripts/gpu/day.sh run </dev/null >>"$WORK/day.log" 2>&1 &
        echo "started; 'bash scripts/gpu/day.sh status' says how far it is, the log is $WORK/day.log"
        ;;
    run) # by start
        exec 9>"$WORK/.lock" # held as long as anything of this day runs
        flock --nonblock 9 || die "a day is at work in $WORK already"
        echo $$ >"$WORK/pid"
        {
            date
            uname -a
            git rev-parse HEAD || true
            python -m pip freeze || true
            nvidia-smi || true
        } >"$WORK/machine.txt" 2>&1
        run_all
        ;;
    smoke | kernels | models | table) "$1" ;;
    *) die "there is no '$1'; use start, status, stop, smoke, kernels, models or table" ;;
esac
