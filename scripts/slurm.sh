#!/usr/bin/env bash
#SBATCH --job-name=nanosprint
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
# Trains on several hosts under Slurm: one torchrun a host, which starts a process a GPU. Submit it from the checkout,
# on a file system that all hosts see: `sbatch scripts/slurm.sh`. Numbers of hosts and GPUs are Slurm's, above, or on
# sbatch's command line. To go on after a failure: `RUN=runs/NAME RESUME=1 sbatch scripts/slurm.sh`.
set -euo pipefail

# --- set these, here or in the environment ------------------------------------------------------------------------
RECIPE=${RECIPE:-record}                  # what to train
RUN=${RUN:-runs/slurm-${SLURM_JOB_ID:-0}} # the run directory, new unless RESUME=1
DATA=${DATA:-data/fineweb10B}             # shards, the same on every host
OVERRIDES=${OVERRIDES:-}                  # such as "train.num_steps=500 exec.timeout_s=300"
RESUME=${RESUME:-0}                       # 1: go on from RUN's last checkpoint
VENV=${VENV:-.venv}                       # where nanosprint is installed
PORT=${PORT:-29400}                       # free on the first host
INTERFACE=${INTERFACE:-}                  # the network between hosts, such as ib0 or eth0; empty: NCCL and gloo choose
# ------------------------------------------------------------------------------------------------------------------

hosts=${SLURM_JOB_NUM_NODES:?submit this with sbatch}
gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:?give --gpus-per-node}}
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${names%%$'\n'*} # not by head, which may end before scontrol has written all
if [ -n "$INTERFACE" ]; then
    export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

read -r -a overrides <<<"$OVERRIDES"
if [ "$RESUME" = 1 ]; then
    words=(resume "$RUN" "${overrides[@]}")
else
    words=(train "$RECIPE" "${overrides[@]}" --data "$DATA" --out "$RUN")
fi

# --kill-on-bad-exit: a host whose torchrun has failed ends those on the others.
srun --kill-on-bad-exit=1 "$VENV/bin/python" -m torch.distributed.run \
    --nnodes "$hosts" --nproc-per-node "$gpus" --max-restarts 0 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$PORT" \
    -m nanosprint "${words[@]}"
