#!/usr/bin/env bash
# Sets up, then runs config/quickstart.yaml on LibreOffice's help: the result is a table and a report page. It takes six
# minutes on two CPU cores after set-up. A second call resumes.
#
#   bash scripts/quickstart.sh [FLAGS of snakemake]
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

bash scripts/reproduce_table.sh config/quickstart.yaml "$@"
cat <<'END'

The report, with curves and attention maps: checkpoints/quickstart/report.html
Next, type sentences and see what each model makes of them:
    source .venv/bin/activate
    fairseq-lot translate --path checkpoints/quickstart/seed1/transformer/base/checkpoint_best.pt
END
