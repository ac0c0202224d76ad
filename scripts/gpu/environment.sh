#!/usr/bin/env bash
# Makes .venv on a machine that has a torch and perhaps no network. What the machine has stays in use, what is missing
# is installed from WHEELS, and nothing is fetched. (With a network, scripts/setup.sh makes one of the tested versions.)
#
#   PYTHON   the interpreter that has torch, 2.6 or newer, and pip (python3)
#   WHEELS   folder of wheels, as pack.sh collects them (wheels)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"

PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-wheels}
HERE=.venv/machine.txt # written at the end: what there is

if [ -f "$HERE" ]; then
    cat "$HERE"
    exit 0
fi
[ ! -e .venv ] || [ -f .venv/machine.log ] || die "there is a .venv already; remove it, or go on with day.sh"
for module in torch pip venv; do
    "$PYTHON" -c "import $module" 2>/dev/null || die "'$PYTHON' has no $module; set PYTHON to one that has"
done
"$PYTHON" -m venv --clear --without-pip .venv
LOG=.venv/machine.log
touch "$LOG"
# every package that PYTHON sees, pip among them, which a virtual environment of a virtual environment would not
"$PYTHON" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
    >"$(echo .venv/lib/python3.*/site-packages)/machine.pth"

# install ARGUMENTS...: pip, without a network.
install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-index --find-links "$WHEELS" --no-compile "$@" \
        >>"$LOG" 2>&1 || die "pip failed: $(grep -i error "$LOG" | tail -n 1) (whole log: $LOG)"
}
mkdir -p "$WHEELS"
install 'setuptools>=68'
install --no-build-isolation -e .
install --no-deps fairseq==0.12.2
.venv/bin/python - >"$HERE.part" 2>>"$LOG" <<'END' || die "the environment is damaged: $(tail -n 1 "$LOG")"
import importlib.metadata
import importlib.util
import platform

import fairseq, fairseq_lot_compat, torch

device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "missing"
print(f".venv is set up: Python {platform.python_version()}, torch {torch.__version__}, triton {triton}, {device}")
END
mv "$HERE.part" "$HERE"
cat "$HERE"
