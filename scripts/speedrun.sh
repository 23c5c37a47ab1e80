#!/usr/bin/env bash
# From a bare host with eight GPUs to the benchmark's official runs: install, fetch and verify the data, check, train
# several seeds, and test whether their mean is below the target. Call it again to go on where it stopped.
#
#   scripts/speedrun.sh             all of it
#   scripts/speedrun.sh --dry-run   the same, but the recipe tiny on two CPU processes in place of what needs GPUs
#
# Variables: RECIPE=record RUNS=10 SHARDS=9 GPUS=8 OUT=runs/speedrun VENV=.venv PYTHON=python3 DATASET=fineweb10B
set -euo pipefail
cd "$(dirname "$0")/.."

dry_run=no
case "${1:-}" in
"") ;;
--dry-run) dry_run=yes ;;
*)
    echo "usage: scripts/speedrun.sh [--dry-run]; settings are variables, told at its head" >&2
    exit 2
    ;;
esac

recipe=${RECIPE:-record} runs=${RUNS:-10} shards=${SHARDS:-9} gpus=${GPUS:-8} dataset=${DATASET:-fineweb10B}
out=${OUT:-runs/speedrun} venv=${VENV:-.venv} python=${PYTHON:-python3}
nanosprint=$venv/bin/nanosprint

step() { printf '\n--- %s\n' "$*"; }

step "GPUs"
if [ "$dry_run" = yes ]; then
    echo "dry run: not looked for"
else
    found=$(nvidia-smi -L | wc -l)
    if [ "$found" -lt "$gpus" ]; then
        echo "the benchmark takes $gpus GPUs and this host has $found: set GPUS=$found for a run that is none of it" >&2
        exit 1
    fi
fi

step "install into $venv"
if [ -x "$nanosprint" ]; then
    echo "it is there"
else
    scripts/install.sh "$python" "$venv" data
fi

step "$dataset: $shards training shards and the validation shard, each verified"
"$nanosprint" data download "$dataset" --shards "$shards"
"$nanosprint" data info "data/$dataset"

step "check $recipe"
"$nanosprint" check "$recipe"

finished=()
for ((number = 1; number <= runs; number++)); do
    run=$out/$number
    step "run $number of $runs: $run"
    finished+=("$run")
    if [ -e "$run/record.json" ]; then
        echo "it is done"
    elif [ -e "$run/run.json" ]; then
        "$nanosprint" resume "$run"
    elif [ "$dry_run" = yes ]; then
        "$nanosprint" train tiny --device cpu --gpus 2 --seed "$number" --out "$run"
    else
        "$nanosprint" train "$recipe" --gpus "$gpus" --data "data/$dataset" --seed "$number" --out "$run"
    fi
done

step "verify"
if [ "$dry_run" = yes ]; then
    echo "dry run: the official test is of $recipe on GPUs; these records only have to be whole"
    for run in "${finished[@]}"; do
        grep -q '"status": *"finished"' "$run/record.json"
    done
else
    "$nanosprint" verify "${finished[@]}"
fi
