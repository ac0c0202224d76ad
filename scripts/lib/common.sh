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

# one_of NAME VALUE CHOICE...: the VALUE of the variable NAME is one of the choices.
one_of() {
    local name=$1 value=$2 choice
    shift 2
    for choice in "$@"; do
        [ "$value" != "$choice" ] || return 0
    done
    die "$name: there is no '$value'; use $(sed 's/ /, /g' <<<"$*")"
}
