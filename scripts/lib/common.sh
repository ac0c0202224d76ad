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
