#!/usr/bin/env bash
# Makes a data folder from your own parallel text, in any pair of languages. An existing folder is not changed.
#
#   SRC=fr TGT=en TRAIN=my/train VALID=my/valid TEST=my/test bash scripts/prepare_corpus.sh
#
#   SRC, TGT     the languages, which are the endings of the file names
#   TRAIN        prefix of the training text: TRAIN=my/train is my/train.fr and my/train.en, also with .xz or .gz
#   VALID, TEST  prefixes, or numbers: N pairs, evenly spread, are taken out of TRAIN
#   TOKENISED    yes: the text is used as it is; no: it becomes Moses tokens in lower case (no)
#   CLEAN        only with TOKENISED=no. yes: drops pairs of TRAIN and VALID that are long or of very different lengths,
#                as fairseq's IWSLT recipe does; no: keeps all pairs (yes)
#   BPE          sentencepiece, or subword_nmt, whose codes go to the file "code"; learnt on both languages together
#                (sentencepiece)
#   VOCAB_SIZE   number of pieces for both languages together; with subword_nmt number of merges (10000)
#   JOINED       yes: one dictionary for both languages; no: one each (yes)
#   DOCUMENTS    yes: sentences are joined to documents (fairseq-lot documents --help); no: a line is a sentence (no)
#   NAME, OUT    name and folder of the result (corpus.SRC-TGT, data-bin/NAME)
#   WORKERS      number of processes (2)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/data.sh

for name in SRC TGT TRAIN VALID TEST; do
    [ -n "${!name:-}" ] || die "$name is not set; give SRC, TGT, TRAIN, VALID and TEST (see the top of $0)"
done
[[ $SRC-$TGT =~ ^[A-Za-z]{2,3}-[A-Za-z]{2,3}$ ]] || die "SRC=$SRC TGT=$TGT must be two language codes, as SRC=fr TGT=en"
: "${TOKENISED:=no}" "${CLEAN:=yes}" "${NAME:=corpus.$SRC-$TGT}" "${OUT:=data-bin/$NAME}"
yes_or_no TOKENISED CLEAN

begin "TRAIN=$TRAIN VALID=$VALID TEST=$TEST TOKENISED=$TOKENISED CLEAN=$CLEAN"
text=("$TRAIN" "$VALID" "$TEST")
if [ "$TOKENISED" = no ]; then
    clean=(--no-clean)
    [ "$CLEAN" = no ] || clean=()
    fairseq-lot tokenise --raw "${text[@]}" --source "$SRC" --target "$TGT" --out "$WORK/text" ${clean[@]+"${clean[@]}"}
    text=("$WORK/text")
fi
binarise "${text[@]}"
