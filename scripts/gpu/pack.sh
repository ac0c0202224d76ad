#!/usr/bin/env bash
# Packs what a GPU machine without a network needs into one archive: this commit, the binarised data, and wheels of
# what the project needs beside torch.
#
#   PYTHON     a Python of the same minor version as that machine's (python3), with pip, headers and g++: fairseq is
#              compiled for it
#   PACKAGES   names out of constraints.txt that the machine lacks (all but torch and the test tools)
#   DATA       folder made by prepare_*.sh or fairseq-preprocess (data-bin/iwslt14-65k)
#   OUT        the archive (checkpoints/gpu-day.tar)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"
source scripts/lib/data.sh

PYTHON=${PYTHON:-python3}
PACKAGES=${PACKAGES:-}
DATA=${DATA:-data-bin/iwslt14-65k}
OUT=${OUT:-checkpoints/gpu-day.tar}

find_languages "$DATA" # it is a data folder
"$PYTHON" -m pip --version >/dev/null 2>&1 || die "there is no pip in '$PYTHON'; give another PYTHON"
git diff --quiet HEAD 2>/dev/null || die "this is no git checkout, or has changes; only what is committed is packed"
make_work "$OUT"
git clone -q --depth 1 "file://$PWD" "$WORK/fairseq_lot"
mkdir -p "$WORK/fairseq_lot/data-bin"
cp -R "$DATA" "$WORK/fairseq_lot/data-bin/"
sed '/^# tests$/,/^$/d; /^torch==/d' constraints.txt >"$WORK/all"
if [ -n "$PACKAGES" ]; then
    for name in $PACKAGES; do
        grep -i "^$name==" "$WORK/all" || die "PACKAGES: there is no '$name' in constraints.txt"
    done >"$WORK/needed"
else
    mv "$WORK/all" "$WORK/needed"
fi
"$PYTHON" -m pip wheel --disable-pip-version-check --no-deps --wheel-dir "$WORK/fairseq_lot/wheels" \
    --requirement "$WORK/needed" fairseq==0.12.2 >"$WORK/pip.log" 2>&1 \
    || die "pip failed: $(grep -i error "$WORK/pip.log" | tail -n 1)"
tar -C "$WORK" -cf "$WORK/archive" fairseq_lot
mv "$WORK/archive" "$OUT"
echo "$OUT is ready, $(du -h "$OUT" | cut -f 1): unpack it there, then 'bash scripts/gpu/environment.sh'"
