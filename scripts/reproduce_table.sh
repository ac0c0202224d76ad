#!/usr/bin/env bash
# Runs the whole experiment and prints its table (the layout of Table 5): for each backbone pretrain, score; for each
# mechanism swap, score, fine-tune, score. A stage that is finished is not run again, one that was stopped goes on.
# Says how far each stage is and how long everything will take, in bars on a terminal, otherwise in lines.
#
#   DATA         folder made by prepare_*.sh, or by fairseq-preprocess alone; when it is missing prepare_iwslt14.sh makes
#                it (its variables apply). SRC, TGT: languages; needed only where DATA has several pairs
#   SIZE         iwslt_de_en or small
#   BACKBONES    "transformer diff_transformer"
#   MECHANISMS   "softmax sinkhorn esp lot"; softmax is the control: the base, fine-tuned for as long. NAME:VARIANT is
#                NAME once more, with other options; NAME:pieces is also calibrated, on random pieces, and
#                NAME:calibrated on the text of DATA, before it is scored
#   SINKHORN_OPTIONS, ESP_OPTIONS, LOT_OPTIONS: flat options, e.g. LOT_OPTIONS="--lot-num-pivots 64"; those of a variant
#                in NAME_VARIANT_OPTIONS (LOT_RELEASED_OPTIONS="--lot-pivot-std 0.02"), otherwise those of NAME
#   SEED, EPOCHS, FINETUNE_EPOCHS, LR, FINETUNE_LR, and the other variables of the scripts in stages/
#   JOBS         backbones, then mechanisms, that run side by side (1); above 1 give each its share in OMP_NUM_THREADS
#   WORK         folder for the checkpoints and the logs;  RESULTS: results file
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/data.sh
source scripts/lib/settings.sh
source scripts/lib/training.sh

check_settings
export DATA=${DATA:-$IWSLT14}
export SIZE=${SIZE:-iwslt_de_en}
export SEED=${SEED:-1}
BACKBONES=${BACKBONES:-transformer diff_transformer}
MECHANISMS=${MECHANISMS:-softmax sinkhorn esp lot}
LOT_RELEASED_OPTIONS=${LOT_RELEASED_OPTIONS:---lot-pivot-std 0.02}
WORK=${WORK:-checkpoints/$(basename "$DATA").$SIZE.seed$SEED}
export RESULTS=${RESULTS:-results/$(basename "$DATA").$SIZE.jsonl}

activate
device_flags
export DEVICE PRECISION
[ -d "$DATA" ] || OUT=$DATA bash scripts/prepare_iwslt14.sh
find_languages "$DATA"

# stage CHAIN WEIGHT TITLE NAME=VALUE... SCRIPT: one line of the plan; the weight is in epochs, roughly.
stage() {
    printf '%s\t%s\t%s\t' "${@:1:3}"
    printf '%q ' env "${@:4:$#-4}" bash "scripts/stages/${!#}"
    echo
}

# plan: the stages, the bases first.
plan() {
    local backbone entry mechanism system own shared options home settings chain title swapped plug_in
    for backbone in $BACKBONES; do
        home=$WORK/$backbone settings=("BACKBONE=$backbone")
        stage "$backbone/base" "${EPOCHS:-25}" "$backbone: pretrain" "${settings[@]}" SAVE="$home/base" pretrain.sh
        stage "$backbone/base" 0.5 "$backbone: score the base" "${settings[@]}" \
            CKPT="$home/base/checkpoint_best.pt" ATTENTION=softmax STAGE=base OUT="$home/base/test.out" score.sh
    done
    echo
    for backbone in $BACKBONES; do
        for entry in $MECHANISMS; do
            home=$WORK/$backbone mechanism=${entry%%:*} system=${entry/:/-}
            own=${system^^}_OPTIONS own=${own//-/_} shared=${mechanism^^}_OPTIONS options=${!own:-${!shared:-}}
            chain=$backbone/$system title="$backbone, $entry"
            settings=("BACKBONE=$backbone" "ATTENTION=$mechanism" "OPTIONS=$options" "BASELINE=$home/base/test.out"
                CHECKED=yes) # by the base's stages
            plug_in=0.2
            case $entry in
                *:pieces) settings+=(CALIBRATE=pieces) plug_in=1 ;;
                *:calibrated) settings+=(CALIBRATE=text) plug_in=1 ;;
                *) settings+=(CALIBRATE=no) ;;
            esac
            swapped=$home/base/checkpoint_best.pt
            if [ "$mechanism" != softmax ]; then
                swapped=$home/$system/swapped.pt
                stage "$chain" "$plug_in" "$title: plug in" "${settings[@]}" \
                    BASE="$home/base/checkpoint_best.pt" OUT="$swapped" plug_and_play.sh
                stage "$chain" 0.5 "$title: score as it stands" "${settings[@]}" \
                    CKPT="$swapped" STAGE=plug-and-play OUT="$home/$system/swapped.out" score.sh
            fi
            stage "$chain" "${FINETUNE_EPOCHS:-10}" "$title: fine-tune" "${settings[@]}" \
                SWAPPED="$swapped" SAVE="$home/$system/finetuned" \
                EPOCHS="${FINETUNE_EPOCHS:-}" LR="${FINETUNE_LR:-}" finetune.sh
            stage "$chain" 0.5 "$title: score fine-tuned" "${settings[@]}" \
                CKPT="$home/$system/finetuned/checkpoint_best.pt" STAGE=fine-tuned \
                OUT="$home/$system/finetuned.out" score.sh
        done
    done
}

plan | CALLED_BY=$(basename "$0") python scripts/lib/check_options.py --architectures \
    $(for backbone in $BACKBONES; do echo "$backbone=$(architecture "$backbone" "$SIZE")"; done)
plan | CALLED_BY=$(basename "$0") python scripts/lib/run_stages.py --logs "$WORK" --jobs "${JOBS:-1}"
fairseq-lot table "$RESULTS"
