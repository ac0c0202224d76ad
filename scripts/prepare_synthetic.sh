#!/usr/bin/env bash
# Makes data-bin/synthetic, the embedded corpus of the quickstart: German-English from a grammar, joint BPE.
#
#   VOCAB_SIZE   BPE pieces of both languages together (1000)
#   OUT          folder of the result; DESCRIPTION is the one line that tables print for it
#   BPE, JOINED, WORKERS: as for prepare_corpus.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/data.sh

SRC=de TGT=en
OUT=${OUT:-data-bin/synthetic}
DESCRIPTION=${DESCRIPTION:-synthetic German-English}

begin "$OUT" 1000
fairseq-lot synthetic --out "$WORK/raw" --train 6000 --valid 300 --test 300
tokenise --no-clean --raw "$WORK/raw"
binarise "$OUT" "$WORK/text"
