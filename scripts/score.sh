#!/usr/bin/env bash
# Translates the test set with a checkpoint and scores the translations: OUT.out, OUT.jsonl and OUT.sentences.tsv.
#
#   bash scripts/score.sh CKPT DATA OUT BASE LABEL [FLAGS of fairseq-generate]
#   bash scripts/score.sh lot.pt data-bin/synthetic checkpoints/lot checkpoints/base.out \
#       '{"system": "LOT", "settings": {"attention": "lot"}, "stage": "plug-and-play"}' --beam 4
#
#   DATA   references are its text/test.*, or else the target side of its binary files; --gen-subset names another test set
#   BASE   translations of the base, OUT.out of an earlier call, for the paired test; - for none
#   LABEL  what the row is about (fairseq-lot score --help)
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

device='from torch import cuda, get_num_threads as n; print(cuda.get_device_name() if cuda.is_available() else f"CPU, threads: {n()}")'
[ $# -ge 5 ] || die "give CKPT, DATA, OUT, BASE and LABEL, then flags of fairseq-generate"
ckpt=$1 data=$2 out=$3 base=$4 label=$5 joined=subword_nmt
[ -f "$ckpt" ] || die "there is no checkpoint $ckpt"
if [[ " ${*:6} " == *" --cpu "* ]]; then export CUDA_VISIBLE_DEVICES=; fi # the row names the device
activate
if [ -f "$data/sentencepiece.bpe.model" ]; then joined=sentencepiece; fi
generate=(fairseq-generate "$data" --user-dir fairseq_lot --gen-subset test --path "$ckpt" --beam 5 --batch-size 128
    --remove-bpe "$joined" "${@:6}")
inputs() { find -L "$ckpt" "$data/" -maxdepth 1 -type f -printf '%p %s %T@\n' 2>/dev/null | LC_ALL=C sort || true; }
made_from=$(echo "${generate[*]}" && inputs)
if [ ! -f "$out.out" ] || [ "$(cat "$out.command" 2>/dev/null)" != "$made_from" ]; then
    { mkdir -p "$(dirname "$out")" && rm -f "$out.out" && touch "$out.err"; } 2>/dev/null \
        || die "cannot write in $(dirname "$out"); free space or give another OUT"
    "${generate[@]}" >"$out.part" 2>"$out.err" || die "fairseq-generate failed: $(tail -n 1 "$out.err")"
    python -c "$device" >"$out.device"
    echo "$made_from" >"$out.command"
    mv "$out.part" "$out.out"
fi
file=$(sed -n 's/.*loaded .* examples from: .*\///p' "$out.err" | tail -n 1) # test.de-en.en
target=${file##*.} subset=${file%%.*} more=()
reference=$data/text/$subset.$target raw=$data/raw/$subset.$target
if [ ! -f "$reference" ]; then # fairseq-preprocess keeps no text; what is not in its dictionary is <<unk>> here
    reference=$out.$target
    grep -q '^T-' "$out.out" || die "$out.out has no T- lines: DATA has no target side for $subset, or --quiet was given"
    grep '^T-' "$out.out" | cut -c 3- | sort -n | cut -f 2- >"$reference"
fi
if [ -f "$raw" ]; then more+=(--raw-reference "$raw"); fi
[ -f "$out.device" ] || python -c "$device" >"$out.device" # translated before devices were noted
if [ "$base" != - ]; then more+=(--baseline-generated "$base"); fi
fairseq-lot score --generated "$out.out" --tokenised-reference "$reference" --target-lang "$target" "${more[@]}" \
    --seconds "$(sed -n 's/.* tokens) in \(.*\)s (.*/\1/p' "$out.err")" --device "$(cat "$out.device")" \
    --out "$out.jsonl" --label "$label" --command="${generate[*]}"
