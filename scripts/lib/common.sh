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

# keep FILE TEXT: write a file, whole or not at all.
keep() { echo "$2" >"$1.part" && mv "$1.part" "$1"; }

# sum_of DATA: a sum of what a training on a data folder depends on; check.py compares it, too.
sum_of() {
    local LC_ALL=C
    { cat "$1"/dict.*.txt "$1"/train.*.idx 2>/dev/null || true; } | sha256sum | cut -d ' ' -f 1
}

# begun OUT: whether there is a checkpoint of a training.
begun() { [ -n "$(find -L "$1" -maxdepth 1 -name 'checkpoint*.pt' 2>/dev/null)" ]; }

# flag NAME DEFAULT FLAGS: the value of --NAME, the last one as for fairseq.
flag() { sed -nE "s/.* --$1[ =]([^ ]+).*/\1/p; t; c$2" <<<" $3"; }

# more_epochs OLD NEW: whether two trainings have the same flags but for the second one's larger --max-epoch.
more_epochs() {
    local others='s/ --max-epoch[ =][0-9]+//g'
    [ "$(sed -E "$others" <<<"$1")" = "$(sed -E "$others" <<<"$2")" ] \
        && [ "$(flag max-epoch 0 "$2")" -gt "$(flag max-epoch 0 "$1")" ] && [[ "$1" != *" --patience"* ]]
}

# train DATA OUT FLAGS...: fairseq-train. It goes on where an earlier call with the same data and flags was stopped, or
# ended if there are to be more epochs.
# finetune.sh sets start: what tells its checkpoint from another of that name.
train() {
    local data=${1%/} out=$2 embeddings=--share-decoder-input-output-embed sum old defaults=() flags
    shift 2
    # what other optimisers and criteria do not have
    [ "$(flag optimizer adam "$*")" != adam ] || defaults+=(--adam-betas '(0.9, 0.98)')
    [[ "$(flag criterion label_smoothed_cross_entropy "$*")" != label_smoothed_* ]] || defaults+=(--label-smoothing 0.1)
    [ -d "$data" ] || die "there is no folder $data; make it with scripts/prepare_*.sh"
    if cmp -s "$data"/dict.*.txt </dev/null; then embeddings=--share-all-embeddings; fi
    sum=$(sum_of "$data")
    if begun "$out"; then # else nothing has been trained, whatever was asked for
        old=$(cat "$out/flags" 2>/dev/null || echo "$*")
        [ "$old" = "$*" ] || { [ -f "$out/checkpoint_last.pt" ] && more_epochs "$old" "$*"; } \
            || die "$out was trained with '$old', not '$*'; remove it or give another folder"
        [ ! -f "$out/data" ] || [ "$(cat "$out/data")" = "$data" ] \
            || die "$out was trained on $(cat "$out/data"), not $data; remove it, or $out/data if the text is the same"
        [ ! -f "$out/data.sum" ] || [ "$(cat "$out/data.sum")" = "$sum" ] \
            || die "$data was made again since $out was trained on it; remove $out or give another folder"
        # fairseq would train on after --patience, and without checkpoint_last.pt
        if [ -f "$out/finished" ] && [ "$old" = "$*" ]; then
            echo "$out is trained already"
            return
        fi
        [ -f "$out/checkpoint_last.pt" ] || [ -f "$out/flags" ] \
            || die "$out has checkpoints that were not trained here, and no checkpoint_last.pt; give another folder"
        [[ " $*" != *" --reset-"* && " $*" != *" --no-save-optimizer-state"* ]] \
            || die "$out would begin again in part, by --reset-* or --no-save-optimizer-state; remove it to train again"
    fi
    flags=("$embeddings" --save-dir "$out" --optimizer adam --weight-decay 0.0001 --criterion label_smoothed_cross_entropy
        "${defaults[@]}" --distributed-world-size 1 --no-epoch-checkpoints --log-interval 100 "$@")
    fairseq-lot check "$data" --training "${flags[@]}" # a sentence that is too long would stop it after an epoch
    mkdir -p "$out" && rm -f "$out/finished" && keep "$out/data" "$data" && keep "$out/data.sum" "$sum" && keep "$out/flags" "$*" \
        && { [ -z "${start:-}" ] || keep "$out/start" "$start"; } \
        || die "cannot write in $out; free space or give another folder"
    fairseq-train "$data" --user-dir fairseq_lot --log-file "$out/train.log" "${flags[@]}"
    [[ " $* " == *" --stop-time-hours"* ]] || keep "$out/finished" "$(date)" # with it fairseq stops early, to go on later
}
