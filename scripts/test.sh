#!/usr/bin/env bash
# Sets up if needed, then checks the code's form and passes the tests; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

bash scripts/setup.sh
activate
export OMP_NUM_THREADS=1
echo "ruff check ."
python -m ruff check .
echo "pytest $*"
exec python -m pytest -n 2 --dist worksteal "$@"
