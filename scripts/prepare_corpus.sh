#!/usr/bin/env bash
# Makes a data folder of one's own parallel text, in any pair of languages, as the other prepare_*.sh do of theirs.
#
#   SRC, TGT     the languages, by which the names of the files end: SRC=fr TGT=en
#   TRAIN        prefix of the text to train on: TRAIN=my/train is my/train.fr and my/train.en
#   VALID, TEST  prefixes too, or numbers: so many pairs, evenly spread over TRAIN, are held out of it
#   TOKENISED    yes: the text is taken as it is; no: it becomes Moses tokens in lower case
#   CLEAN        of text that is tokenised here, keep every pair (no), or drop long and unequal ones as fairseq's IWSLT
#                recipe does, except from TEST (yes)
#   BPE          sentencepiece or subword_nmt (which keeps its codes as "code"), learned on both languages together
#   VOCAB_SIZE   pieces of both languages together, with subword_nmt merges (10000)
#   JOINED       yes: one dictionary for both languages; no: one each
#   NAME, OUT    name and folder of the result
#   WORKERS      processes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
source scripts/lib/data.sh

for name in SRC TGT TRAIN VALID TEST; do
    [ -n "${!name:-}" ] || die "$name is not set; give SRC, TGT, TRAIN, VALID and TEST (see the top of $0)"
done
for name in SRC TGT; do
    [[ ${!name} =~ ^[A-Za-z]{2,3}$ ]] || die "$name=${!name} is not a language code; give two or three letters"
done
[ "$SRC" != "$TGT" ] || die "SRC and TGT are both $SRC; give two different languages"
one_of TOKENISED "${TOKENISED:=no}" yes no
one_of CLEAN "${CLEAN:=yes}" yes no
NAME=${NAME:-corpus.$SRC-$TGT}
OUT=${OUT:-data-bin/$NAME}

begin "$OUT" 10000
text=("$TRAIN" "$VALID" "$TEST")
if [ "$TOKENISED" = no ]; then
    keep=()
    [ "$CLEAN" = yes ] || keep=(--no-clean)
    tokenise ${keep[@]+"${keep[@]}"} --raw "${text[@]}"
    text=("$WORK/text")
fi
binarise "$OUT" "${text[@]}"
