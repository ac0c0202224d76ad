#!/usr/bin/env bash
# Runs one part of a half-hour program on a borrowed GPU machine, which may have no network.
#
#   bash scripts/gpu_half_hour.sh pack                          # here, first: downloads packages to .gpu/wheels
#   bash scripts/gpu_half_hour.sh PART --out FOLDER [FLAGS]     # on the GPU machine
#
#   PART    smoke, tune, layers, models or experiment
#   FLAGS   see python -m benchmarks gpu --help
#   PYTHON  for pack: a Python of the GPU machine's version (python3); for PART: the Python that has PyTorch (python3)
#   THERE   for pack: a file that lists the packages of the GPU machine, one a line; pack leaves them out (only torch)
# Between the two, copy the repository with .gpu and the data of config/iwslt14-65k-full.yaml to the GPU machine. A part
# stops in time; the same call on the same machine continues it.
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 1 ] || die "give pack or a PART"
python=${PYTHON:-python3}

# needed: print the lines of constraints.txt for this Python, without the packages of the tests and of THERE.
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
    if [ ! -f .gpu/env/made ]; then # a venv that also sees the packages of the machine's Python
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
