#!/usr/bin/env bash
# Runs one job of the workflow. Its output goes to LOG. Lines on stderr say when it begins and ends, and each minute its
# progress (on a terminal the workflow draws bars instead). A second call waits for the first, even if the workflow that
# started the first was killed: COMMAND inherits the lock.
#
#   job.sh TITLE LOG COMMAND...
set -euo pipefail
source "$(dirname "$0")/common.sh"
title=$1 log=$2
shift 2

say() { [ -t 2 ] || echo "$(date +%T) $title: $*" >&2; }
whole_characters() { iconv -c -f utf-8 -t utf-8 || true; }
last() { tail -c 2000 "$log" | whole_characters | tr '\r' '\n' | grep -v '^ *$' | tail -n 1; }
every_minute() {
    while read -rt 60 _ || [ $? -gt 128 ]; do # until the job's end closes the pipe
        say "$((SECONDS / 60)) min $(last | sed 's/.* | //' | cut -c 1-110 | whole_characters)"
    done
}

mkdir -p "$(dirname "$log")" && exec 9>>"$log.lock" || die "cannot write $log; free space or give another folder as work"
flock --nonblock 9 || { say "waiting for an earlier call" && flock 9; }
say begun
exec 8> >(every_minute 9>&-)
code=0
"$@" >>"$log" 2>&1 8>&- || code=$?
exec 8>&-
if [ "$code" = 0 ]; then
    say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
else
    echo "error: $title: $(last) (whole log: $log); fix the cause, then the same call continues" >&2
fi
exit "$code"
