#!/usr/bin/env bash
# Makes data-bin/iwslt14.de-en, the real data of the result table: IWSLT'14 German-English, joint BPE.
#
#   TOKENISED    folder with tokenised, lower-cased {train,valid,test}.{de,en}: nothing is downloaded
#   ARCHIVE      local copy of the raw archive (de-en.tgz or 2014-01.tgz); without either it is fetched from URL
#   VOCAB_SIZE   BPE pieces of both languages together (10000)
#   NAME, OUT    name and folder of the result; DESCRIPTION is the one line that tables print for it
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
if [ "$NAME" = iwslt14.de-en ]; then
    DESCRIPTION=${DESCRIPTION:-IWSLT\'14 De-En}
else
    DESCRIPTION=${DESCRIPTION:-$NAME}
fi

# fetch URL FILE: the file appears under its name only when it is whole.
fetch() {
    local display=--silent
    if [ -t 2 ]; then display=--progress-bar; fi
    if command -v curl >/dev/null; then
        curl --fail --location "$display" --connect-timeout 30 --output "$2.part" "$1"
    elif command -v wget >/dev/null; then
        wget --quiet --output-document="$2.part" "$1"
    else
        die "neither curl nor wget is installed; fetch $1 yourself and give its path as ARCHIVE"
    fi || {
        rm -f "$2.part"
        die "cannot download $1; fetch it yourself and give its path as ARCHIVE, or a tokenised folder as TOKENISED"
    }
    mv "$2.part" "$2"
}

begin "$OUT" 10000
if [ -z "$TOKENISED" ]; then
    if [ -z "$ARCHIVE" ]; then
        ARCHIVE=$(dirname "$OUT")/de-en.tgz
        [ -f "$ARCHIVE" ] || fetch "$URL" "$ARCHIVE"
    fi
    fairseq-lot iwslt14 --archive "$ARCHIVE" --out "$WORK/raw"
    tokenise --no-clean --raw "$WORK/raw" # iwslt14 has cleaned it
    TOKENISED=$WORK/text
fi
binarise "$OUT" "$TOKENISED"
