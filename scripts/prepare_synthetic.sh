#!/usr/bin/env bash
# Makes data-bin/synthetic, the quickstart's corpus: the German-English text of examples/corpus, joint BPE.
#
#   VOCAB_SIZE   BPE pieces of both languages together (1000)
#   OUT          folder of the result
#   BPE, JOINED, WORKERS: as for prepare_corpus.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/data.sh

SRC=de TGT=en
OUT=${OUT:-data-bin/synthetic}

begin "$OUT" 1000
mkdir "$WORK/raw"
for file in examples/corpus/*.xz; do
    name=${file##*/}
    python -c 'import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())' "$file" >"$WORK/raw/${name%.xz}"
done
tokenise --no-clean --raw "$WORK/raw"
binarise "$OUT" "$WORK/text"
