#!/usr/bin/env bash
# Sets up if needed, then checks the code's form and passes the tests; arguments go to pytest.
# With --slow it passes those that take long instead (soak, kill -9, exhaustive grids), and the numeric ones once more
# with the simplest instructions of the processor, as another machine may round in another way.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

arguments=() slow=
for argument; do
  if [ "$argument" = --slow ]; then slow=yes; else arguments+=("$argument"); fi
done
bash scripts/setup.sh
activate
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # where it is set, every process of the tests would compile what it imports anew

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
