# Shared by the scripts that make data folders, after common.sh.

# require_numbers NAME...: the named variables hold whole numbers.
require_numbers() {
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[0-9]+$ ]] || die "$name=${!name} is not a whole number"
    done
}

# one_of NAME VALUE CHOICE...: the VALUE of the variable NAME is one of the choices.
one_of() {
    [[ " ${*:3} " == *" $2 "* ]] || die "$1: there is no '$2'; use $(sed 's/ /, /g' <<<"${*:3}")"
}

# make_work OUT: set WORK to a fresh folder beside OUT that is removed when the script ends, however it ends.
make_work() {
    local parent
    parent=$(dirname "$1")
    mkdir -p "$parent" 2>/dev/null && WORK=$(mktemp -d "${1%/}.part.XXXXXX" 2>/dev/null) \
        || die "cannot write in $parent; give another OUT"
    trap 'rm -rf "$WORK"' EXIT
    trap 'exit 130' INT TERM
}

# is_complete OUT: every file of a finished data folder is there. The folder is renamed when it is complete,
# so that this only fails when somebody removed a file.
is_complete() {
    local out=$1 split name
    for split in train valid test; do
        for name in "$SRC.bin" "$SRC.idx" "$TGT.bin" "$TGT.idx"; do
            [ -f "$out/$split.$SRC-$TGT.$name" ] || return 1
        done
    done
    for name in "dict.$SRC.txt" "dict.$TGT.txt" "text/test.$SRC" "text/test.$TGT" vocab_size; do
        [ -f "$out/$name" ] || return 1
    done
    [ -f "$out/sentencepiece.bpe.model" ] || [ -f "$out/code" ]
}

# made_with OUT NAME: the value of the variable NAME that OUT was made with, as far as its files say.
made_with() {
    case $2 in
        VOCAB_SIZE) cat "$1/vocab_size" ;;
        BPE)
            if [ -f "$1/code" ]; then echo subword_nmt; fi
            if [ -f "$1/sentencepiece.bpe.model" ]; then echo sentencepiece; fi
            ;;
        JOINED)
            if [ -f "$1/dict.$SRC.txt" ] && [ -f "$1/dict.$TGT.txt" ]; then
                if cmp -s "$1/dict.$SRC.txt" "$1/dict.$TGT.txt"; then echo yes; else echo no; fi
            fi
            ;;
    esac
}

# reuse OUT: end the script at once when OUT is complete and was made with what is asked for.
# An incomplete folder that prepare_*.sh made is made again; any other folder is left alone.
reuse() {
    local out=$1 made name
    [ -e "$out" ] || return 0
    if [ ! -f "$out/vocab_size" ]; then
        rmdir "$out" 2>/dev/null || die "$out exists and was not made by prepare_*.sh; remove it or give another OUT"
        return 0
    fi
    [ -f "$out/train.$SRC-$TGT.$SRC.idx" ] || [ -z "$(find "$out" -name 'train.*.idx')" ] \
        || die "$out is not of $SRC-$TGT; remove it or give another OUT"
    for name in VOCAB_SIZE BPE JOINED; do
        made=$(made_with "$out" "$name")
        [ -z "$made" ] || [ "${!name:-$made}" = "$made" ] \
            || die "$out was made with $name=$made, not ${!name}; remove it or give another OUT"
    done
    is_complete "$out" || return 0
    echo "$out is complete (VOCAB_SIZE=$(made_with "$out" VOCAB_SIZE)); remove it to make it again"
    exit 0
}

# begin OUT VOCAB_SIZE: reuse OUT, or check the settings of a new one, which has that vocabulary if none is asked for,
# and make WORK.
begin() {
    one_of BPE "${BPE:-sentencepiece}" sentencepiece subword_nmt
    one_of JOINED "${JOINED:-yes}" yes no
    reuse "$1"
    VOCAB_SIZE=${VOCAB_SIZE:-$2} WORKERS=${WORKERS:-2} BPE=${BPE:-sentencepiece} JOINED=${JOINED:-yes}
    require_numbers VOCAB_SIZE WORKERS
    activate
    if [ "$BPE" = subword_nmt ]; then
        python -c 'import subword_nmt' 2>/dev/null \
            || die "BPE=subword_nmt needs the package subword-nmt, which is not installed; run 'pip install subword-nmt'"
    fi
    make_work "$1"
}

# tokenise FLAGS...: write the Moses tokens of the text that the flags name to WORK/text.
tokenise() {
    fairseq-lot tokenise --source "$SRC" --target "$TGT" --out "$WORK/text" "$@"
}

# binarise OUT TEXT...: BPE, fairseq-preprocess, then one rename to OUT.
binarise() {
    local out=${1%/} new=$WORK/new bpe=$WORK/bpe log=$WORK/preprocess.log joined=()
    shift
    fairseq-lot encode --text "$@" --source "$SRC" --target "$TGT" --out "$bpe" \
        --bpe "$BPE" --vocab-size "$VOCAB_SIZE" --threads "$WORKERS"
    [ "$JOINED" = no ] || joined=(--joined-dictionary)
    fairseq-preprocess -s "$SRC" -t "$TGT" ${joined[@]+"${joined[@]}"} \
        --trainpref "$bpe/train" --validpref "$bpe/valid" --testpref "$bpe/test" \
        --destdir "$new" --workers "$WORKERS" >"$log" 2>&1 || {
        cp "$log" "$out.log" 2>/dev/null || true
        die "fairseq-preprocess failed: $(tail -n 1 "$log") (whole log: $out.log)"
    }
    complete "$bpe" "$new" 2>/dev/null || die "cannot write $out; free space or give another OUT"
    chmod 755 "$new"
    if [ -e "$out" ]; then mv "$out" "$WORK/old"; fi
    mv "$new" "$out"
    rm -f "$out.log"
    echo "$out is ready: $SRC-$TGT, VOCAB_SIZE=$VOCAB_SIZE"
}

# complete BPE_DIR NEW: put beside the binary files what scoring and detokenisation need.
complete() {
    local name
    for name in text raw sentencepiece.bpe.model code; do
        [ ! -e "$1/$name" ] || cp -R "$1/$name" "$2/" || return 1
    done
    echo "$VOCAB_SIZE" >"$2/vocab_size"
}
