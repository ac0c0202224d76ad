#!/usr/bin/env bash
# Puts what a GPU day found into one archive to bring back: scores, translations, tables, figures and logs, without the
# checkpoints. While the day is at work it takes what there is.
#
#   WORK   folder of day.sh (checkpoints/gpu-day);  OUT: the archive (WORK.tar.gz)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/common.sh"

WORK=${WORK:-checkpoints/gpu-day}
WORK=${WORK%/}
OUT=${OUT:-$WORK.tar.gz}

[ -f "$WORK/day.log" ] || die "there is no day in $WORK; give its WORK"
tar -C "$(dirname "$WORK")" --exclude='*.pt' --exclude='*.part' --exclude=.lock --warning=no-file-changed \
    -czf "$OUT.part" "$(basename "$WORK")" || [ $? -eq 1 ] || die "cannot write $OUT; free space or give another OUT"
mv "$OUT.part" "$OUT"
echo "$OUT is ready, $(du -h "$OUT" | cut -f 1)"
