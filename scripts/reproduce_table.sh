#!/usr/bin/env bash
# Runs the whole experiment and prints its table (the layout of Table 5): for each backbone pretrain, score; for each
# mechanism swap, score, fine-tune, score. A stage that is finished is not run again, one that was stopped goes on.
#
#   DATA         folder made by prepare_*.sh; made with prepare_iwslt14.sh (its variables apply) when it is missing
#   SIZE         iwslt_de_en or small
#   BACKBONES    "transformer diff_transformer"
#   MECHANISMS   "softmax sinkhorn esp lot"; softmax is the control: the base, fine-tuned for as long. NAME:VARIANT is
#                NAME once more, with other options; NAME:calibrated is also calibrated, on DATA, before it is scored
#   SINKHORN_OPTIONS, ESP_OPTIONS, LOT_OPTIONS: flat options, e.g. LOT_OPTIONS="--lot-num-pivots 64"; those of a variant
#                in NAME_VARIANT_OPTIONS (LOT_RELEASED_OPTIONS="--lot-pivot-std 0.02"), otherwise those of NAME
#   SEED, EPOCHS, FINETUNE_EPOCHS, LR, FINETUNE_LR, and the other variables of pretrain.sh, finetune.sh, score.sh
#   WORK         folder for the checkpoints;  RESULTS: results file
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export DATA=${DATA:-data-bin/iwslt14.de-en}
export SIZE=${SIZE:-iwslt_de_en}
export SEED=${SEED:-1}
BACKBONES=${BACKBONES:-transformer diff_transformer}
MECHANISMS=${MECHANISMS:-softmax sinkhorn esp lot}
LOT_RELEASED_OPTIONS=${LOT_RELEASED_OPTIONS:---lot-pivot-std 0.02}
WORK=${WORK:-checkpoints/$(basename "$DATA").$SIZE.seed$SEED}
export RESULTS=${RESULTS:-results/$(basename "$DATA").$SIZE.jsonl}

activate
is_complete "$DATA" || OUT=$DATA bash scripts/prepare_iwslt14.sh

# say TEXT: announce the next of TOTAL stages, with the time since the start.
STAGE_NUMBER=0
TOTAL=0
for _ in $BACKBONES; do
    TOTAL=$((TOTAL + 2))
    for mechanism in $MECHANISMS; do
        if [ "$mechanism" = softmax ]; then TOTAL=$((TOTAL + 2)); else TOTAL=$((TOTAL + 4)); fi
    done
done
say() {
    STAGE_NUMBER=$((STAGE_NUMBER + 1))
    printf '== %d/%d  %dm%02ds  %s\n' $STAGE_NUMBER $TOTAL $((SECONDS / 60)) $((SECONDS % 60)) "$*" >&2
}

# with NAME=VALUE... SCRIPT: run one stage.
with() { env "${@:1:$#-1}" bash "scripts/${!#}"; }

for backbone in $BACKBONES; do
    export BACKBONE=$backbone
    home=$WORK/$backbone
    base=$home/base/checkpoint_best.pt
    say "$backbone: pretrain"
    with SAVE="$home/base" pretrain.sh
    say "$backbone: score the base"
    with CKPT="$base" ATTENTION=softmax STAGE=base OUT="$home/base/test.out" score.sh
    for entry in $MECHANISMS; do
        mechanism=${entry%%:*}
        system=${entry/:/-}
        own=${system^^}_OPTIONS own=${own//-/_} shared=${mechanism^^}_OPTIONS
        options=${!own:-${!shared:-}}
        stage=("ATTENTION=$mechanism" "OPTIONS=$options" "BASELINE=$home/base/test.out")
        if [ "$entry" = "$mechanism:calibrated" ]; then stage+=(CALIBRATE=yes); fi
        swapped=$home/$system/swapped.pt
        if [ "$mechanism" = softmax ]; then
            swapped=$base
        else
            say "$backbone: plug in $system $options"
            with "${stage[@]}" BASE="$base" OUT="$swapped" plug_and_play.sh
            say "$backbone: score $system as it stands"
            with "${stage[@]}" CKPT="$swapped" STAGE=plug-and-play OUT="$home/$system/swapped.out" score.sh
        fi
        say "$backbone: fine-tune $system"
        with "${stage[@]}" SWAPPED="$swapped" SAVE="$home/$system/finetuned" \
            EPOCHS="${FINETUNE_EPOCHS:-}" LR="${FINETUNE_LR:-}" finetune.sh
        say "$backbone: score $system fine-tuned"
        with "${stage[@]}" CKPT="$home/$system/finetuned/checkpoint_best.pt" STAGE=fine-tuned \
            OUT="$home/$system/finetuned.out" score.sh
    done
done

fairseq-lot table "$RESULTS"
