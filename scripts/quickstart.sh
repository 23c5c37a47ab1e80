#!/usr/bin/env bash
# Trains a small model on Shakespeare, generates text and draws the loss curve. A second call goes on with, or shows,
# what is there. Usage: scripts/quickstart.sh NANOSPRINT RUN
set -euo pipefail
cd "$(dirname "$0")/.."
nanosprint=$1 run=$2

if [ -e "$run/run.json" ]; then
    "$nanosprint" resume "$run"
else
    "$nanosprint" train shakespeare --out "$run"
fi
echo
echo "--- 300 characters of generated text ---"
"$nanosprint" sample "$run" --tokens 300
echo "---"
"$nanosprint" plot "$run" --x seconds
echo "everything is in $run: record.json (the result), metrics.jsonl (every step), checkpoints, loss.png"
echo "next: $nanosprint --help; to train anew, remove $run"
