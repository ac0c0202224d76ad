#!/usr/bin/env bash
# Makes data-bin/iwslt14.de-en, the real data of the result table: IWSLT'14 German-English, joint BPE.
#
#   TOKENISED    folder with tokenised, lower-cased {train,valid,test}.{de,en}: nothing is downloaded
#   ARCHIVE      local copy of the raw archive (de-en.tgz or 2014-01.tgz); without either it is fetched from URL
#   VOCAB_SIZE   BPE pieces of both languages together (10000)
#   NAME, OUT    name and folder of the result
#   BPE, JOINED, WORKERS: as for prepare_corpus.sh; BPE=subword_nmt JOINED=no is what fairseq's recipe does
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/data.sh

SRC=de TGT=en
TOKENISED=${TOKENISED:-}
ARCHIVE=${ARCHIVE:-}
URL=${URL:-http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz}
NAME=${NAME:-iwslt14.de-en}
OUT=${OUT:-data-bin/$NAME}

begin "$OUT" 10000
if [ -z "$TOKENISED" ]; then
    from=(--archive "$ARCHIVE")
    [ -n "$ARCHIVE" ] || from=(--archive "$(dirname "$OUT")/de-en.tgz" --url "$URL")
    fairseq-lot iwslt14 "${from[@]}" --out "$WORK/raw"
    tokenise --no-clean --raw "$WORK/raw" # iwslt14 has cleaned it
    TOKENISED=$WORK/text
fi
binarise "$OUT" "$TOKENISED"
