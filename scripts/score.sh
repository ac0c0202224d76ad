#!/usr/bin/env bash
# Translates the test set with a checkpoint and scores the translations: OUT.out, OUT.jsonl and OUT.sentences.tsv.
#
#   bash scripts/score.sh CKPT DATA OUT BASE LABEL [FLAGS of fairseq-generate]
#   bash scripts/score.sh lot.pt data-bin/help checkpoints/lot checkpoints/base.out \
#       '{"system": "LOT", "settings": {"attention": "lot"}, "stage": "plug-and-play"}' --beam 4
#
#   DATA   references are its text/test.*, or else the target side of its binary files; --gen-subset names another test set
#   BASE   translations of the base, OUT.out of an earlier call, for the paired test; - for none
#   LABEL  JSON that says which system the row belongs to (fairseq-lot score --help)
set -euo pipefail
source "$(dirname "$0")/lib/common.sh"

[ $# -ge 5 ] || die "give CKPT, DATA, OUT, BASE and LABEL, then flags of fairseq-generate"
activate
exec python -m fairseq_lot.experiment.score "$@"
