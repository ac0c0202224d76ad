#!/usr/bin/env bash
# Makes data-bin/iwslt14.de-en, the real data of the result table: IWSLT'14 German-English, joint BPE.
#
#   TOKENISED    folder with tokenised, lower-cased {train,valid,test}.{de,en}: nothing is downloaded
#   ARCHIVE      local copy of the raw archive (de-en.tgz or 2014-01.tgz); without either it is fetched from URL
#   PAIRS        list of hashes: only these pairs are trained on (config/iwslt14-65k.pairs; subset.py says what it is)
#   NAME, OUT    name and folder of the result
#   VOCAB_SIZE, BPE, JOINED, DOCUMENTS, WORKERS: as for prepare_corpus.sh; fairseq's recipe has BPE=subword_nmt JOINED=no
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/data.sh

SRC=de TGT=en
: "${TOKENISED:=}" "${ARCHIVE:=}" "${PAIRS:=}" "${NAME:=iwslt14.de-en}" "${OUT:=data-bin/$NAME}"
: "${URL:=http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz}"

begin "TOKENISED=$TOKENISED ARCHIVE=$ARCHIVE URL=$URL${PAIRS:+ PAIRS=$PAIRS}"
if [ -z "$TOKENISED" ]; then
    from=(--archive "$ARCHIVE")
    [ -n "$ARCHIVE" ] || from=(--archive "$(dirname "$OUT")/de-en.tgz" --url "$URL")
    fairseq-lot iwslt14 "${from[@]}" --out "$WORK/raw"
    fairseq-lot tokenise --raw "$WORK/raw" --source de --target en --out "$WORK/text" --no-clean # iwslt14 has cleaned it
    TOKENISED=$WORK/text
fi
if [ -n "$PAIRS" ]; then
    python scripts/subset.py "$PAIRS" "$TOKENISED" "$WORK/subset"
    TOKENISED=$WORK/subset
fi
binarise "$TOKENISED"
