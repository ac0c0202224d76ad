#!/usr/bin/env bash
# Installs the project with the tested versions (constraints.txt), then fairseq itself. A second call ends at once. An
# unfinished or outdated .venv is made again from scratch.
#
#   VIRTUAL_ENV  the active virtual environment, if any: packages are added to it, and a torch in range (setup.py) stays
#   PYTHON       without VIRTUAL_ENV, the interpreter that makes .venv (python3)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

FAIRSEQ=fairseq==0.12.2
ENVIRONMENT=${VIRTUAL_ENV:-.venv}
STAMP=$ENVIRONMENT/fairseq_lot.stamp # written at the end, with the checksum of "wanted"
BEGUN=$ENVIRONMENT/fairseq_lot.begun # exists while a set-up is unfinished
LOG=$ENVIRONMENT/setup.log

# version PYTHON: print its version, such as "3 11".
version() {
    "$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null
}

# wanted: print a checksum of everything that a finished set-up depends on.
wanted() {
    { pwd; version "$ENVIRONMENT/bin/python"; echo "$FAIRSEQ"; cat setup.py constraints.txt fairseq_lot_compat.*; } \
        | sha256sum
}

# check_python PYTHON: stop if it is too old or lacks something; note a version newer than the tested ones.
check_python() {
    local found major minor
    found=$(version "$1") || die "'$1' is not a Python; set PYTHON to a Python 3.10 or newer"
    read -r major minor <<<"$found"
    [ "$major" -eq 3 ] && [ "$minor" -ge 10 ] \
        || die "$1 is Python $major.$minor; set PYTHON to a Python 3.10 or newer"
    [ "$minor" -le 13 ] || echo "note: Python 3.$minor is newer than those tested (3.10 to 3.13)"
    # fairseq has no wheels for current Python, so that pip compiles it
    command -v g++ >/dev/null || die "there is no g++, which fairseq is compiled with; install the Debian package g++"
    "$1" -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").read_bytes()' \
        2>/dev/null \
        || die "there is no Python.h, which fairseq is compiled with; install the Debian package python3.$minor-dev"
    [ -n "${VIRTUAL_ENV:-}" ] || "$1" -c 'import ensurepip, venv' 2>/dev/null \
        || die "$1 has no module venv; install the Debian package python3.$minor-venv"
}

# constraints: print constraints.txt; without torch and its requirements if the environment has another torch in range.
constraints() {
    "$ENVIRONMENT/bin/python" - <<'END'
import importlib.metadata, re

def plain(name):
    return name.lower().replace("_", "-")

kept = set()
try:
    torch = importlib.metadata.distribution("torch")
    if [int(number) for number in torch.version.split(".")[:2]] >= [2, 6]:
        kept = {plain(re.split(r"[^\w.-]", line)[0]) for line in ["torch", *(torch.requires or [])]}
except importlib.metadata.PackageNotFoundError:
    pass
print("".join(line for line in open("constraints.txt") if plain(line.split("==")[0]) not in kept), end="")
END
}

# forget_unfinished: remove packages whose installation was killed: they lack INSTALLER, the last file that pip writes.
forget_unfinished() {
    local packages
    packages=$("$ENVIRONMENT/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    find "$packages" -maxdepth 1 -name '*.dist-info' -newer "$BEGUN" \
        ! -exec test -f '{}/INSTALLER' ';' -exec rm -rf '{}' +
}

# installed_fairseq: note the fairseq that the environment already has, if any; pip keeps any that is called 0.12.2.
installed_fairseq() {
    "$ENVIRONMENT/bin/python" - <<'END'
import importlib.metadata, importlib.util

spec = importlib.util.find_spec("fairseq")
if spec and spec.origin:
    try:
        version = importlib.metadata.version("fairseq")
    except importlib.metadata.PackageNotFoundError:
        version = "without a version"
    outcome = "it stays" if version == "0.12.2" else "0.12.2 is installed beside or instead of it"
    print(f"note: there is fairseq {version} in {spec.submodule_search_locations[0]} already; {outcome}")
END
}

# install ARGUMENTS...: run pip install; show its large downloads, write everything else to the log.
install() {
    "$ENVIRONMENT/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
        --no-compile "$@" 2>&1 | tee -a "$LOG" \
        | { grep --line-buffered -oE '(Downloading|Using cached) .*[0-9]{2}\.[0-9] MB\)' || true; } \
        || die "pip failed: $(grep -i error "$LOG" | tail -n 1) (whole log: $LOG)"
}

if [ -n "${VIRTUAL_ENV:-}" ]; then
    PYTHON=$VIRTUAL_ENV/bin/python
    [ -x "$PYTHON" ] || die "there is no bin/python in the active $VIRTUAL_ENV; run 'deactivate' first"
fi
{ exec 9>>.venv.lock; } 2>/dev/null || die "cannot write in $PWD; is there space left?"
flock --nonblock 9 || { echo "another set-up is at work; waiting" >&2 && flock 9; }
if [ "$(cat "$STAMP" 2>/dev/null)" = "$(wanted)" ] \
    && { [ -z "${PYTHON:-}" ] || [ "$(version "$PYTHON")" = "$(version "$ENVIRONMENT/bin/python")" ]; }; then
    echo "$ENVIRONMENT is set up"
    exit 0
fi

PYTHON=${PYTHON:-python3}
check_python "$PYTHON"
echo "1/3 virtual environment $ENVIRONMENT, Python $(version "$PYTHON" | tr ' ' .)"
if [ -z "${VIRTUAL_ENV:-}" ]; then
    "$PYTHON" -m venv --clear .venv >/dev/null 2>&1 || die "cannot make $PWD/.venv; is there space left?"
fi
"$ENVIRONMENT/bin/python" -m pip --version >/dev/null 2>&1 \
    || die "there is no pip in $ENVIRONMENT; run 'python -m ensurepip' or 'deactivate' first"
[ ! -f "$BEGUN" ] || forget_unfinished
rm -f "$STAMP" "$LOG"
[ -f "$BEGUN" ] || touch "$BEGUN"
extras=test
read -r _ minor <<<"$(version "$ENVIRONMENT/bin/python")"
[ "$minor" -lt 11 ] || extras+=,experiment # snakemake needs 3.11
echo "2/3 the project with its requirements, such as torch: one to five minutes"
constraints >"$ENVIRONMENT/fairseq_lot.constraints"
install -c "$ENVIRONMENT/fairseq_lot.constraints" -e ".[$extras]"
echo "3/3 $FAIRSEQ, compiled the first time: half a minute"
installed_fairseq
install --no-deps "$FAIRSEQ"
"$ENVIRONMENT/bin/python" -c 'import fairseq_lot_compat, fairseq, torch' >>"$LOG" 2>&1 \
    || die "the installation is damaged: $(tail -n 1 "$LOG") (remove $ENVIRONMENT and run this again)"
wanted >"$STAMP.new"
mv "$STAMP.new" "$STAMP"
rm "$BEGUN"
echo "set up in $SECONDS s; 'source $ENVIRONMENT/bin/activate' for the commands"
