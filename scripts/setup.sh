#!/usr/bin/env bash
# Installs the project with the tested versions (constraints.txt), then fairseq itself. A second call ends at once. An
# installation into .venv that was not finished, or that was for something else, is made again from the beginning.
#
#   VIRTUAL_ENV  the active virtual environment, if any, which is added to: a torch in range (setup.py) stays there
#   PYTHON       otherwise, the interpreter that makes .venv (python3)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

FAIRSEQ=fairseq==0.12.2
ENVIRONMENT=${VIRTUAL_ENV:-.venv}
STAMP=$ENVIRONMENT/fairseq_lot.stamp # written at the end, with what was installed
BEGUN=$ENVIRONMENT/fairseq_lot.begun # there while a set-up is under way
LOG=$ENVIRONMENT/setup.log

# version PYTHON: its version as "3 11".
version() {
    "$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null
}

# wanted: what a finished set-up depends on.
wanted() {
    { pwd; version "$ENVIRONMENT/bin/python"; echo "$FAIRSEQ"; cat setup.py constraints.txt fairseq_lot_compat.*; } \
        | sha256sum
}

# check_python PYTHON: stop when something is missing, or too old; say so when it is newer than what has been tested.
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

# constraints: constraints.txt; without torch, and what torch needs, where another torch in range stands already.
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

# forget_unfinished: remove packages whose installation was killed (INSTALLER comes last); pip takes them for complete.
forget_unfinished() {
    local packages
    packages=$("$ENVIRONMENT/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    find "$packages" -maxdepth 1 -name '*.dist-info' -newer "$BEGUN" \
        ! -exec test -f '{}/INSTALLER' ';' -exec rm -rf '{}' +
}

# installed_fairseq: which fairseq the environment has already, if any; pip keeps 0.12.2 and what calls itself so.
installed_fairseq() {
    "$ENVIRONMENT/bin/python" - <<'END'
import importlib.metadata, importlib.util

spec = importlib.util.find_spec("fairseq")
if spec and spec.origin:
    try:
        version = importlib.metadata.version("fairseq")
    except importlib.metadata.PackageNotFoundError:
        version = "without a version"
    what = "which stays" if version == "0.12.2" else "beside or instead of which 0.12.2 is installed"
    print(f"note: there is fairseq {version} in {spec.submodule_search_locations[0]} already, {what}")
END
}

# install ARGUMENTS...: pip, with its large downloads shown and everything else in the log.
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
echo "2/3 the project and what it needs, torch among it: one to five minutes"
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
