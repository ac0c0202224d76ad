#!/usr/bin/env bash
# Runs the whole experiment and prints its table (the layout of Table 5): for each backbone pretrain, score; for each
# mechanism swap, score, fine-tune, score. A stage that is finished is not run again, one that was stopped goes on.
# Says how far each stage is and how long everything will take, in bars on a terminal, otherwise in lines.
#
#   DATA         folder made by prepare_*.sh, or by fairseq-preprocess alone; when it is missing prepare_iwslt14.sh makes
#                it (its variables apply). SRC, TGT: languages; needed only where DATA has several pairs
#   SIZE         iwslt_de_en or small
#   BACKBONES    "transformer diff_transformer"
#   MECHANISMS   "softmax sinkhorn sinkhorn:soft esp lot"; softmax is the control: the base, fine-tuned for as long.
#                NAME:VARIANT is NAME once more, with other options; NAME:pieces is also calibrated, on random pieces,
#                and NAME:calibrated on the text of DATA, before it is scored. There are sinkhorn:soft (softmax's own
#                temperature), sinkhorn:learnt (its temperatures calibrated on random pieces), lot:released (the
#                initialisation of the released code), lot:everywhere (encoder, cross, decoder; calibrated likewise)
#   SINKHORN_OPTIONS, ESP_OPTIONS, LOT_OPTIONS: flat options, e.g. LOT_OPTIONS="--lot-num-pivots 64"; those of a variant
#                in NAME_VARIANT_OPTIONS, as LOT_RELEASED_OPTIONS below, otherwise those of NAME
#   PROTOCOL     papers or quick; EPOCHS, PATIENCE, FINETUNE_EPOCHS, LR, BEST and what else it sets are in lib/protocols.sh
#   SEEDS        "1"; of several the table shows medians
#   JOBS         backbones, then mechanisms, that run side by side (1); above 1 give each its share in OMP_NUM_THREADS
#   WORK         folder for the checkpoints and the logs of a seed (checkpoints/NAME.SIZE.seedN), of several WORK/seedN;
#                a base that stands in it at BACKBONE/base, with a file "finished", is not trained
#   RESULTS      results file;  the other variables of the scripts in stages/
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/data.sh
source scripts/lib/settings.sh
source scripts/lib/protocols.sh
source scripts/lib/training.sh

check_settings
export DATA=${DATA:-$IWSLT14}
export SIZE=${SIZE:-iwslt_de_en}
read -rd '' -a seeds <<<"${SEEDS:-${SEED:-1}}" || true
BACKBONES=${BACKBONES:-transformer diff_transformer}
MECHANISMS=${MECHANISMS:-softmax sinkhorn sinkhorn:soft esp lot}
SINKHORN_SOFT_OPTIONS=${SINKHORN_SOFT_OPTIONS:---sinkhorn-epsilon 1 --sinkhorn-num-updates 3}
SINKHORN_LEARNT_OPTIONS=${SINKHORN_LEARNT_OPTIONS:---sinkhorn-learn-epsilon true}
LOT_RELEASED_OPTIONS=${LOT_RELEASED_OPTIONS:---lot-pivot-std 0.02}
LOT_EVERYWHERE_OPTIONS=${LOT_EVERYWHERE_OPTIONS:---attention-sites encoder,cross,decoder --lot-num-pivots 128}
use_protocol
export RESULTS=${RESULTS:-results/$(basename "$DATA").$SIZE.jsonl}

activate
device_flags
export DEVICE PRECISION
[ -d "$DATA" ] || OUT=$DATA bash scripts/prepare_iwslt14.sh
find_languages "$DATA"

# work_of SEED: the folder of its checkpoints and logs.
work_of() {
    case ${WORK:+given}.${#seeds[@]} in
        given.1) echo "$WORK" ;;
        given.*) echo "$WORK/seed$1" ;;
        *) echo "checkpoints/$(basename "$DATA").$SIZE.seed$1" ;;
    esac
}

# stage CHAIN WEIGHT TITLE NAME=VALUE... SCRIPT: one line of the plan; the weight is in epochs, roughly.
stage() {
    printf '%s\t%s\t%s\t' "${@:1:3}"
    printf '%q ' env "${@:4:$#-4}" bash "scripts/stages/${!#}"
    echo
}

# plan: the stages, the bases first.
plan() {
    local seed backbone
    for seed in "${seeds[@]}"; do
        for backbone in $BACKBONES; do base_stages; done
    done
    echo
    for seed in "${seeds[@]}"; do
        for backbone in $BACKBONES; do mechanism_stages; done
    done
}

# base_stages: those of one base, which seed and backbone name.
base_stages() {
    local home title settings=("BACKBONE=$backbone" "SEED=$seed")
    home=$(work_of "$seed")/$backbone title=$(titled "$backbone")
    stage "$home/base" "$EPOCHS" "$title: pretrain" "${settings[@]}" SAVE="$home/base" pretrain.sh
    stage "$home/base" 0.5 "$title: score the base" "${settings[@]}" \
        CKPT="$home/base/checkpoint_best.pt" ATTENTION=softmax STAGE=base OUT="$home/base/test.out" score.sh
}

# titled TEXT: with the seed, where there are several.
titled() {
    [ ${#seeds[@]} = 1 ] || printf 'seed %s, ' "$seed"
    echo "$1"
}

# mechanism_stages: those of all mechanisms in one base.
mechanism_stages() {
    local entry mechanism system own shared options home settings chain title swapped plug_in
    for entry in $MECHANISMS; do
        home=$(work_of "$seed")/$backbone mechanism=${entry%%:*} system=${entry/:/-}
        own=${system^^}_OPTIONS own=${own//-/_} shared=${mechanism^^}_OPTIONS options=${!own:-${!shared:-}}
        chain=$home/$system title=$(titled "$backbone, $entry")
        settings=("BACKBONE=$backbone" "SEED=$seed" "ATTENTION=$mechanism" "OPTIONS=$options"
            "BASELINE=$home/base/test.out" CHECKED=yes) # by the base's stages
        plug_in=0.2
        case $entry in
            *:pieces | sinkhorn:learnt | lot:everywhere) settings+=(CALIBRATE=pieces) plug_in=1 ;;
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
        stage "$chain" "$FINETUNE_EPOCHS" "$title: fine-tune" "${settings[@]}" \
            SWAPPED="$swapped" SAVE="$home/$system/finetuned" finetune.sh
        stage "$chain" 0.5 "$title: score fine-tuned" "${settings[@]}" \
            CKPT="$home/$system/finetuned/checkpoint_best.pt" STAGE=fine-tuned \
            OUT="$home/$system/finetuned.out" score.sh
    done
}

mapfile -t folders < <(for seed in "${seeds[@]}"; do work_of "$seed"; done)
plan | CALLED_BY=$(basename "$0") python scripts/lib/check_options.py --architectures \
    $(for backbone in $BACKBONES; do echo "$backbone=$(architecture "$backbone" "$SIZE")"; done)
plan | CALLED_BY=$(basename "$0") python scripts/lib/run_stages.py --lock "${folders[@]}" --jobs "${JOBS:-1}"
fairseq-lot table "$RESULTS"
