#!/usr/bin/env bash
# Runs one part of a half-hour program for a borrowed GPU; the machine may have no network.
#
#   bash scripts/gpu_half_hour.sh pack                     # before, here: .gpu/wheels, what the machine's Python lacks
#   bash scripts/gpu_half_hour.sh PART --out FOLDER        # there: smoke, tune, layers, models, experiment
#
#   PYTHON  pack: a Python of the machine's version (python3); PART: the one with PyTorch (python3)
#   THERE   pack: a file with names of the packages that the machine has, one a line; without it only torch counts as there
#   FLAGS   of PART: python -m benchmarks gpu --help
# Copy .gpu and the data of config/iwslt14-65k-full.yaml with the repository. A part stops in time; the same call on the
# same machine continues it.
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 1 ] || die "give pack or a PART"
python=${PYTHON:-python3}

# needed: lines of constraints.txt for this Python, without tests and what THERE names.
needed() {
    "$python" - "${THERE:-/dev/null}" <<'END'
import re, sys

def plain(name):
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", name.strip())[0]).lower()

# greedy scheduling does not need PuLP, which is large
there = {"torch", "pulp", "", *map(plain, open(sys.argv[1]))}
section = ""
for line in open("constraints.txt"):
    section = line[2:] if line.startswith("#") else section
    version, _, condition = line.partition(";")
    if "==" in version and not line.startswith("#") and not section.startswith("tests"):
        if plain(version) not in there and '< "3.11"' not in condition:
            print(version.strip())
END
}

if [ "$1" = pack ]; then
    mkdir -p .gpu && rm -rf .gpu/wheels
    "$python" -m venv --clear .gpu/pip >/dev/null 2>&1 || die "$python has no module venv; set PYTHON to another"
    needed >.gpu/needed
    .gpu/pip/bin/python -m pip --disable-pip-version-check wheel -q --no-deps -w .gpu/wheels -r .gpu/needed fairseq==0.12.2
    rm -r .gpu/pip
    du -sh .gpu/wheels
    exit 0
fi

if [ -z "${VIRTUAL_ENV:-}" ] && [ ! -d .venv ] && [ -d .gpu/wheels ]; then
    if [ ! -f .gpu/env/made ]; then # a venv that also sees what the machine's Python has
        install=("$python" -m pip --python .gpu/env/bin/python --disable-pip-version-check install -q --no-index --no-deps)
        rm -rf .gpu/env
        "$python" -m venv --without-pip .gpu/env
        site=$(.gpu/env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/machine.pth"
        "${install[@]}" --no-compile .gpu/wheels/*.whl
        "${install[@]}" --no-build-isolation -e .
        touch .gpu/env/made
    fi
    export VIRTUAL_ENV=$PWD/.gpu/env
    export PATH=$VIRTUAL_ENV/bin:$PATH
fi
activate
exec python -m benchmarks gpu "$@"
