# Shared by all scripts, which source it first: every path is relative to the repository root.

if [ "${BASH_VERSINFO[0]}" -lt 4 ]; then
    echo "$(basename "$0"): error: this is bash $BASH_VERSION; bash 4 or newer is needed, on Linux" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Print one line and stop with the exit code of bad input.
die() {
    echo "$(basename "$0"): error: $*" >&2
    exit 2
}

# Use the active virtual environment, or the repository's own.
activate() {
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        [ -f .venv/bin/activate ] || die "there is no .venv here; run 'bash scripts/setup.sh' first"
        source .venv/bin/activate
    fi
}

# is_complete OUT: every file of a finished data folder is there. The folder is renamed when it is complete,
# so that this only fails when somebody removed a file.
is_complete() {
    local out=$1 split name
    for split in train valid test; do
        for name in de.bin de.idx en.bin en.idx; do
            [ -f "$out/$split.de-en.$name" ] || return 1
        done
    done
    for name in dict.de.txt dict.en.txt sentencepiece.bpe.model text/test.de text/test.en vocab_size description.txt; do
        [ -f "$out/$name" ] || return 1
    done
}

# reuse OUT: end the script at once when OUT is complete and was made with the vocabulary that is asked for.
# An incomplete data folder is made again; any other folder is left alone.
reuse() {
    local out=$1 made
    if ! is_complete "$out"; then
        [ ! -e "$out" ] || [ -f "$out/dict.de.txt" ] || rmdir "$out" 2>/dev/null \
            || die "$out exists and is not a data folder; remove it or give another OUT"
        return 0
    fi
    made=$(cat "$out/vocab_size")
    [ "${VOCAB_SIZE:-$made}" = "$made" ] \
        || die "$out was made with VOCAB_SIZE=$made, not $VOCAB_SIZE; remove it or give another OUT"
    echo "$out is complete (VOCAB_SIZE=$made); remove it to make it again"
    exit 0
}

# put TEXT FILE: the file is either complete or as it was.
put() {
    mkdir -p "$(dirname "$2")" 2>/dev/null && printf '%s\n' "$1" 2>/dev/null >"$2.part" && mv "$2.part" "$2" \
        || die "cannot write $2; free space or give another folder"
}

# same_settings PRODUCT SETTINGS: what was made before was made with the same settings.
same_settings() {
    local made
    if [ -e "$1" ] && [ -f "$1.settings" ]; then
        made=$(cat "$1.settings")
        [ "$made" = "$2" ] || die "$1 was made with '$made', not '$2'; remove it or give another name"
    fi
}

# require_numbers NAME...: the named variables hold whole numbers.
require_numbers() {
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[0-9]+$ ]] || die "$name=${!name} is not a whole number"
    done
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

# binarise TEXT_DIR OUT: joint BPE of VOCAB_SIZE pieces, fairseq-preprocess, then one rename to OUT.
binarise() {
    local text=$1 out=${2%/} new=$WORK/new bpe=$WORK/bpe log=$WORK/preprocess.log
    fairseq-lot encode --text "$text" --out "$bpe" --vocab-size "$VOCAB_SIZE" --threads "$WORKERS"
    fairseq-preprocess -s de -t en --joined-dictionary \
        --trainpref "$bpe/train" --validpref "$bpe/valid" --testpref "$bpe/test" \
        --destdir "$new" --workers "$WORKERS" >"$log" 2>&1 || {
        cp "$log" "$out.log" 2>/dev/null || true
        die "fairseq-preprocess failed: $(tail -n 1 "$log") (whole log: $out.log)"
    }
    complete "$text" "$bpe" "$new" 2>/dev/null || die "cannot write $out; free space or give another OUT"
    chmod 755 "$new"
    if [ -e "$out" ]; then mv "$out" "$WORK/old"; fi
    mv "$new" "$out"
    rm -f "$out.log"
    echo "$out is ready: $DESCRIPTION, VOCAB_SIZE=$VOCAB_SIZE"
}

# complete TEXT_DIR BPE_DIR NEW: put beside the binary files what scoring and detokenisation need.
complete() {
    cp -R "$2/text" "$2/sentencepiece.bpe.model" "$3/" || return 1
    if [ -f "$1/raw/test.en" ]; then
        mkdir "$3/raw" && cp "$1/raw/test.en" "$3/raw/" || return 1
    fi
    echo "$VOCAB_SIZE" >"$3/vocab_size" && echo "$DESCRIPTION" >"$3/description.txt"
}
