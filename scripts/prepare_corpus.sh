#!/usr/bin/env bash
# Makes a data folder from your own parallel text, in any pair of languages. An existing folder is not changed.
#
#   SRC, TGT     the languages: the endings of the file names, as SRC=fr TGT=en
#   TRAIN        prefix of the training text: TRAIN=my/train is my/train.fr and my/train.en, also with .xz or .gz
#   VALID, TEST  prefixes, or numbers: N pairs, evenly spread, are taken out of TRAIN
#   TOKENISED    yes: the text is used as it is; no: it becomes Moses tokens in lower case
#   CLEAN        if the text is tokenised here: yes: drop long and unequal pairs of TRAIN and VALID, as fairseq's IWSLT
#                recipe does; no: keep all pairs
#   BPE          sentencepiece, or subword_nmt (its codes are the file "code"), learned on both languages together
#   VOCAB_SIZE   pieces of both languages together, with subword_nmt merges (10000)
#   JOINED       yes: one dictionary for both languages; no: one each
#   DOCUMENTS    yes: sentences are joined (fairseq-lot documents --help); no: a line is a sentence
#   NAME, OUT    name and folder of the result
#   WORKERS      processes
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
