#!/usr/bin/env bash
# Makes data-bin/libreoffice, German-English documents: LibreOffice's help, split by pages (examples/libreoffice-help).
#
#   bash scripts/prepare_libreoffice.sh
#
#   PAIRS        lines of page, German and English text (examples/libreoffice-help/pairs.tsv.xz)
#   MAX_WORDS    drop paragraphs with more words on a side (no limit)
#   TEST_PAIRS   number of test pairs, evenly spread (all)
#   DOCUMENTS    yes: paragraphs are joined to documents of up to 2,048 pieces; the test sets are paragraphs (test) and
#                documents of up to LENGTHS pieces (test1, test2, ...). no: a line is a paragraph (yes)
#   LENGTHS      limits of the documents in test1, test2, ... ("512 1024 2048")
#   CHAPTERS     yes: a document may join several pages of a folder, so it is longer; no: it stays within a page (no)
#   NAME, OUT    name and folder of the result (libreoffice, data-bin/NAME)
#   VOCAB_SIZE, BPE, JOINED, WORKERS: as for prepare_corpus.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
: "${DOCUMENTS:=yes}" # data.sh would set it to no
source scripts/lib/data.sh

SRC=de TGT=en
: "${PAIRS:=examples/libreoffice-help/pairs.tsv.xz}" "${MAX_WORDS:=}" "${TEST_PAIRS:=}" "${CHAPTERS:=no}" "${NAME:=libreoffice}" "${OUT:=data-bin/$NAME}"

yes_or_no CHAPTERS
[ "$CHAPTERS" = no ] || chapters=yes
begin "PAIRS=$PAIRS${MAX_WORDS:+ MAX_WORDS=$MAX_WORDS}${TEST_PAIRS:+ TEST_PAIRS=$TEST_PAIRS}${chapters:+ CHAPTERS=yes}${LENGTHS:+ LENGTHS=$LENGTHS}"
fairseq-lot libreoffice "$PAIRS" --out "$WORK/raw" ${MAX_WORDS:+--max-words "$MAX_WORDS"} \
    ${TEST_PAIRS:+--test-pairs "$TEST_PAIRS"} ${chapters:+--chapters}
fairseq-lot tokenise --raw "$WORK/raw" --source de --target en --out "$WORK/text" --no-clean
NAMES=$WORK/raw
binarise "$WORK/text"
