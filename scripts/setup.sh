#!/usr/bin/env bash
# Installs the project with the tested versions (constraints.txt), then fairseq itself. A second call ends at once;
# a call after a killed one goes on.
#
#   VIRTUAL_ENV  the active virtual environment, if any; otherwise .venv is made here
#   PYTHON       the interpreter that makes .venv (python3)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

FAIRSEQ=fairseq==0.12.2
ENVIRONMENT=${VIRTUAL_ENV:-.venv}
STAMP=$ENVIRONMENT/fairseq_lot.stamp # a finished set-up's fingerprint
BEGUN=$ENVIRONMENT/fairseq_lot.begun # where the first set-up was begun, and when
LOG=$ENVIRONMENT/setup.log

# fingerprint: what a finished set-up depends on; empty where something is missing.
fingerprint() {
    "$ENVIRONMENT/bin/python" -I -c 'import importlib.util, sys
print(sys.version, sys.prefix, sys.modules["fairseq_lot_bootstrap"], importlib.util.find_spec("fairseq").origin)' \
        2>/dev/null || return 0
    { pwd; echo "$FAIRSEQ"; cat setup.py pyproject.toml constraints.txt fairseq_lot_bootstrap.*; } | sha256sum
}

# version PYTHON: its version as "3 11".
version() {
    "$1" -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null
}

# check_python PYTHON: stop when it is too old, say so when it is newer than what has been tested.
check_python() {
    local found major minor
    found=$(version "$1") || die "'$1' is not a Python; set PYTHON to a Python 3.10 or newer"
    read -r major minor <<<"$found"
    [ "$major" -eq 3 ] && [ "$minor" -ge 10 ] \
        || die "$1 is Python $major.$minor; set PYTHON to a Python 3.10 or newer"
    [ "$minor" -le 13 ] || echo "note: Python 3.$minor is newer than those tested (3.10 to 3.13)"
}

# check_compiler PYTHON: fairseq has no wheels for current Python, so that pip compiles it.
check_compiler() {
    local name
    name=python$(version "$1" | tr ' ' .)
    command -v g++ >/dev/null || die "there is no g++, which fairseq is compiled with; install the Debian package g++"
    "$1" -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").read_bytes()' \
        2>/dev/null || die "there is no Python.h, which fairseq is compiled with; install the Debian package $name-dev"
}

# make_environment: .venv with pip; one that is half made, or was moved here, is made again.
make_environment() {
    local python=${PYTHON:-python3}
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        "$VIRTUAL_ENV/bin/python" -m pip --version >/dev/null 2>&1 \
            || die "there is no pip in $VIRTUAL_ENV; run 'python -m ensurepip' or 'deactivate' first"
        return 0
    fi
    if .venv/bin/pip --version >/dev/null 2>&1 && [ "$(cat "$BEGUN" 2>/dev/null || pwd)" = "$PWD" ]; then return 0; fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null \
        || die "$python has no module venv; install the Debian package python$(version "$python" | tr ' ' .)-venv"
    "$python" -m venv --clear .venv >/dev/null 2>&1 || die "cannot make $PWD/.venv; is there space left?"
}

# remove_unfinished: forget packages whose installation was killed (INSTALLER comes last); pip takes them for complete.
remove_unfinished() {
    local packages info
    packages=$("$ENVIRONMENT/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    find "$packages" -maxdepth 1 -name '*.dist-info' -newer "$BEGUN" | while read -r info; do
        [ -f "$info/INSTALLER" ] || rm -rf "$info"
    done
}

# install ARGUMENTS...: pip, with its large downloads shown and everything else in the log.
install() {
    "$ENVIRONMENT/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@" 2>&1 \
        | tee -a "$LOG" | { grep --line-buffered -oE '(Downloading|Using cached) .*[0-9]{2}\.[0-9] MB\)' || true; } \
        || die "pip failed: $(grep -i error "$LOG" | tail -n 1) (whole log: $LOG)"
}

if [ -n "${VIRTUAL_ENV:-}" ]; then
    [ -x "$VIRTUAL_ENV/bin/python" ] || die "there is no bin/python in the active $VIRTUAL_ENV; run 'deactivate' first"
elif [ -n "${PYTHON:-}" ] && version .venv/bin/python >/dev/null; then
    check_python "$PYTHON"
    [ "$(version "$PYTHON")" = "$(version .venv/bin/python)" ] \
        || die ".venv was made with Python $(version .venv/bin/python | tr ' ' .), not with $PYTHON; remove .venv first"
fi
if [ -f "$STAMP" ] && [ "$(fingerprint)" = "$(cat "$STAMP")" ]; then
    echo "$ENVIRONMENT is set up"
    exit 0
fi

BASE=$ENVIRONMENT/bin/python
[ -n "$(version "$BASE")" ] || BASE=${PYTHON:-python3}
check_python "$BASE"
check_compiler "$BASE"
echo "1/3 virtual environment $ENVIRONMENT, Python $(version "$BASE" | tr ' ' .)"
make_environment
rm -f "$STAMP" "$LOG"
[ -f "$BEGUN" ] || pwd >"$BEGUN"
remove_unfinished
echo "2/3 the project and what it needs, torch among it: one to five minutes"
install -c constraints.txt -e '.[test]'
echo "3/3 $FAIRSEQ, compiled the first time: half a minute"
install --no-deps "$FAIRSEQ"
"$ENVIRONMENT/bin/python" -c 'import fairseq_lot_bootstrap, fairseq, torch' >>"$LOG" 2>&1 \
    || die "the installation is damaged: $(tail -n 1 "$LOG") (remove $ENVIRONMENT and run this again)"
fingerprint >"$STAMP.new"
mv "$STAMP.new" "$STAMP"
echo "set up in $SECONDS s; 'source $ENVIRONMENT/bin/activate' for the commands"
