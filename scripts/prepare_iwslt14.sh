#!/usr/bin/env bash
# Makes data-bin/iwslt14.de-en: IWSLT'14 German-English with a joint BPE.
#
#   ARCHIVE=de-en.tgz bash scripts/prepare_iwslt14.sh
#
#   TOKENISED    folder with tokenised, lower-cased {train,valid,test}.{de,en}; ARCHIVE and URL are not used then
#   ARCHIVE      local copy of the raw archive, de-en.tgz or 2014-01.tgz (downloaded from URL)
#   PAIRS        file with hashes of the training pairs to keep, such as config/iwslt14-65k.pairs; scripts/subset.py
#                makes such files (all pairs)
#   NAME, OUT    name and folder of the result (iwslt14.de-en, data-bin/NAME)
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
