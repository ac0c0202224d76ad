#!/usr/bin/env bash
# Makes data-bin/synthetic, the embedded corpus of the quickstart: German-English from a grammar, joint BPE.
#
#   VOCAB_SIZE   BPE pieces of both languages together (1000)
#   OUT          folder of the result; DESCRIPTION is the one line that tables print for it
#   WORKERS      processes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

OUT=${OUT:-data-bin/synthetic}
DESCRIPTION=${DESCRIPTION:-synthetic German-English}
WORKERS=${WORKERS:-2}

reuse "$OUT"
VOCAB_SIZE=${VOCAB_SIZE:-1000}
require_numbers VOCAB_SIZE WORKERS
activate
make_work "$OUT"
fairseq-lot synthetic --out "$WORK/raw" --train 6000 --valid 300 --test 300
fairseq-lot tokenise --raw "$WORK/raw" --out "$WORK/text" --no-clean
binarise "$WORK/text" "$OUT"
