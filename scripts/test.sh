#!/usr/bin/env bash
# Sets up if needed, then runs the linters, the type checker and the fast tests.
#
#   bash scripts/test.sh [--slow] [ARGUMENTS of pytest]
#
# With --slow it runs the slow tests instead (soak, kill -9, exhaustive grids), then the numeric tests once more without
# the processor's vector instructions, because other machines round differently.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

arguments=() slow=
for argument; do
  if [ "$argument" = --slow ]; then slow=yes; else arguments+=("$argument"); fi
done
bash scripts/setup.sh
activate
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # if it were set, every test process would compile its imports again

tests() {
  echo "pytest $*"
  python -m pytest -n 2 --dist worksteal "$@"
}

if [ -z "$slow" ]; then
  for form in "ruff check ." "ruff format --check ." mypy; do
    echo "$form"
    python -m $form
  done
  tests "${arguments[@]}"
else
  tests -m slow "${arguments[@]}"
  echo "once more with ATEN_CPU_CAPABILITY=default"
  ATEN_CPU_CAPABILITY=default tests "${arguments[@]}" tests/attention tests/modules tests/transport \
    tests/plug_and_play tests/end_to_end/test_{data_parallel,decoding,training_options}.py
fi
