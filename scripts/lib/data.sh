# Shared by prepare_*.sh, after common.sh. Settings are variables; the commands below check those that are not yes or no.

: "${VOCAB_SIZE:=10000}" "${BPE:=sentencepiece}" "${JOINED:=yes}" "${DOCUMENTS:=no}" "${WORKERS:=2}"

# yes_or_no NAME...: stop if a named variable is neither yes nor no.
yes_or_no() {
    local name
    for name; do [[ ${!name} =~ ^(yes|no)$ ]] || die "$name=${!name} is neither yes nor no"; done
}

# same FILE TEXT: stop if OUT/FILE exists and differs from TEXT; folders of early versions lack "sources".
same() {
    [ ! -f "$OUT/$1" ] || [ "$(cat "$OUT/$1")" = "$2" ] \
        || die "$OUT was made with '$(cat "$OUT/$1")', not '$2'; remove it or give another OUT"
}

# begin SOURCES: end the script if OUT was already made with the same settings from the same sources. Otherwise make the
# folder WORK, which is removed when the script ends.
begin() {
    yes_or_no JOINED DOCUMENTS
    [[ $OUT != *,* ]] || die "OUT=$OUT has a comma, at which fairseq-preprocess splits names; give another OUT"
    OUT=${OUT%/} sources=$1
    settings="$SRC-$TGT VOCAB_SIZE=$VOCAB_SIZE BPE=$BPE JOINED=$JOINED DOCUMENTS=$DOCUMENTS"
    if [ -f "$OUT/settings" ]; then
        same settings "$settings"
        same sources "$sources"
        echo "$OUT is complete; remove it to make it again"
        exit 0
    fi
    [ ! -e "$OUT" ] || rmdir "$OUT" 2>/dev/null \
        || die "$OUT exists and was not made by prepare_*.sh; remove it or give another OUT"
    mkdir -p "$(dirname "$OUT")" 2>/dev/null && WORK=$(mktemp -d "$OUT.part.XXXXXX" 2>/dev/null) \
        || die "cannot write in $(dirname "$OUT"); give another OUT"
    trap 'rm -rf "$WORK"' EXIT
    trap 'exit 130' INT TERM
    activate
}

# binarise TEXT...: apply BPE and fairseq-preprocess in WORK, then rename the result to OUT.
binarise() {
    local new=$WORK/new log=$WORK/log joined=() names=() tests
    # NAMES: folder with the document of each pair; LENGTHS: limits of the documents in further test sets
    # shellcheck disable=SC2206  # several numbers
    [ -z "${NAMES:-}" ] || names=(--names "$NAMES" ${LENGTHS:+--tests $LENGTHS})
    fairseq-lot encode --text "$@" --source "$SRC" --target "$TGT" --out "$new" \
        --bpe "$BPE" --vocab-size "$VOCAB_SIZE" --threads "$WORKERS"
    [ "$DOCUMENTS" = no ] || fairseq-lot documents "$new" --source "$SRC" --target "$TGT" ${names[@]+"${names[@]}"}
    [ "$JOINED" = no ] || joined=(--joined-dictionary)
    local LC_ALL=C # in other locales test1.de may come before test.de
    tests=("$new"/test*."$SRC")
    fairseq-preprocess -s "$SRC" -t "$TGT" ${joined[@]+"${joined[@]}"} --workers "$WORKERS" --destdir "$new" \
        --trainpref "$new/train" --validpref "$new/valid" --testpref "$(IFS=, && echo "${tests[*]%."$SRC"}")" \
        >"$log" 2>&1 || {
        cp "$log" "$OUT.log" 2>/dev/null || true
        die "fairseq-preprocess failed: $(tail -n 1 "$log") (whole log: $OUT.log)"
    }
    rm "$new"/{train,valid,test*}.{"$SRC","$TGT"}
    # if another call has made OUT meanwhile, that one stays
    { echo "$sources" >"$new/sources" && echo "$settings" >"$new/settings" && mv -T "$new" "$OUT"; } 2>/dev/null \
        || [ "$(cat "$OUT/settings" 2>/dev/null)" = "$settings" ] || die "cannot write $OUT; free space or give another OUT"
    rm -f "$OUT.log"
    echo "$OUT is ready: $settings"
}
