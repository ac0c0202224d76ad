#!/usr/bin/env bash
# Translates the test set with one checkpoint and adds its scores to a results file: one cell of the result table.
#
#   CKPT         the checkpoint
#   DATA, SRC, TGT: as for pretrain.sh; references are its text/test.TGT, or else the target side of its binary files
#   RESULTS      results file, one JSON line per scored system; another one gets the scores of stored translations
#   STAGE        base, plug-and-play or fine-tuned
#   BASELINE     translations of the base (*.out), for the paired test; none for the base itself
#   BACKBONE, SIZE, ATTENTION, OPTIONS, CALIBRATE, CALIBRATE_OPTIONS, SEED: labels of the row
#   CHECKED      yes: that DATA and CKPT fit together is known, and not looked at again
#   OUT          where the translations are kept; BEAM, BATCH (sentences), PRECISION, DEVICE
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
source scripts/lib/data.sh
source scripts/lib/settings.sh
source scripts/lib/training.sh

check_settings
[ -n "${CKPT:-}" ] || die "CKPT is not set; give the checkpoint to score"
DATA=${DATA:-$IWSLT14}
BACKBONE=${BACKBONE:-transformer}
SIZE=${SIZE:-iwslt_de_en}
ATTENTION=${ATTENTION:-softmax}
OPTIONS=${OPTIONS:-}
STAGE=${STAGE:-base}
SEED=${SEED:-1}
RESULTS=${RESULTS:-results/$(basename "$DATA").$SIZE.jsonl}
OUT=${OUT:-${CKPT%.pt}.test.out}
BEAM=${BEAM:-5}
BATCH=${BATCH:-128}

if [ "$CKPT" -nt "$OUT" ]; then rm -f "$OUT" "$OUT.scored"; fi  # translations of an earlier checkpoint
if [ -f "$RESULTS" ] && grep -qxF "$RESULTS" "$OUT.scored" 2>/dev/null; then
    echo "$OUT is scored in $RESULTS; remove $OUT.scored to score it again"
    exit 0
fi
activate
device_flags
find_languages "$DATA"
generate=(fairseq-generate "$DATA" --user-dir fairseq_lot -s "$SRC" -t "$TGT" --gen-subset test
    --path "$CKPT" --beam "$BEAM" --batch-size "$BATCH" --remove-bpe "$(joining "$DATA")" "${DEVICE_FLAGS[@]}")
if [ ! -f "$OUT" ]; then
    check_data "$DATA" --split test --path "$CKPT"
    mkdir -p "$(dirname "$OUT")"
    started=$(date +%s)
    "${generate[@]}" >"$OUT.part" || die "fairseq-generate failed: $(tail -n 1 "$OUT.part")"
    put $(($(date +%s) - started)) "$OUT.seconds"
    mv "$OUT.part" "$OUT"
fi

reference=$DATA/text/test.$TGT
if [ ! -f "$reference" ]; then # fairseq-preprocess keeps no text; what is not in its dictionary is <<unk>> here
    reference=$OUT.reference
    sed -n 's/^T-//p' "$OUT" 2>/dev/null | sort -n | cut -f 2- >"$reference.part" && mv "$reference.part" "$reference" \
        || die "cannot write $reference; free space or give another OUT"
fi
references=(--tokenised-reference "$reference" --target-lang "$TGT")
if [ -f "$DATA/raw/test.$TGT" ]; then references+=(--raw-reference "$DATA/raw/test.$TGT"); fi
if [ -n "${BASELINE:-}" ]; then references+=(--baseline-generated "$BASELINE"); fi
fairseq-lot score --generated "$OUT" "${references[@]}" --results "$RESULTS" \
    --dataset "$(cat "$DATA/description.txt" 2>/dev/null || basename "$DATA")" --architecture "$(architecture "$BACKBONE" "$SIZE")" \
    --backbone "$BACKBONE" --mechanism "$ATTENTION" --options="$(label)" --stage "$STAGE" --seed "$SEED" \
    --precision "$PRECISION" --device "$(device_name)" --seconds "$(cat "$OUT.seconds")" --command="${generate[*]}"
echo "$RESULTS" >>"$OUT.scored"
