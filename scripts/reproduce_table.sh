#!/usr/bin/env bash
# Runs an experiment and prints its table. A second call resumes: nothing is trained twice. While another call runs the
# same experiment, it waits.
#
#   bash scripts/reproduce_table.sh [CONFIG.yaml [FLAGS of snakemake]]
#   bash scripts/reproduce_table.sh config/iwslt14.yaml --profile workflow/profiles/gpu
#
#   CONFIG.yaml  the experiment (config/iwslt14.yaml)
#   FLAGS        --dry-run lists the jobs, --cores 1 runs one at a time
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

config=${1:-config/iwslt14.yaml}
[ -f "$config" ] || die "there is no $config; give one of config/*.yaml"
bash scripts/setup.sh
activate
command -v snakemake >/dev/null || die "there is no snakemake here; give an environment of Python 3.11 or newer (set PYTHON)"
mkdir -p checkpoints
exec 9>>"checkpoints/.$(basename "$config").lock"
flock --nonblock 9 || { echo "another call is at work on $config; waiting" >&2 && flock 9; }
if [ -t 2 ]; then show=(--logger rich); else show=(--quiet all); fi
if [[ "$*" == *slurm* ]]; then
    python -c 'import snakemake_executor_plugin_slurm' 2>/dev/null \
        || die "snakemake has no executor for SLURM here; run 'pip install snakemake-executor-plugin-slurm' in $VIRTUAL_ENV"
    show=(--quiet reason host) # the output of jobs stays on the cluster
fi
snakemake --configfile "$config" --nolock "${show[@]}" "${@:2}" # its rule "all" prints the table
