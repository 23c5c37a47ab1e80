#!/usr/bin/env bash
# Makes a virtual environment and installs nanosprint into it, with torch for the hardware at hand.
# Usage: scripts/install.sh PYTHON VENV EXTRA
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 extra=$3

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "nanosprint needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Try: make PYTHON=python3.12" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    echo "an NVIDIA driver is here: installing torch with CUDA"
    "${pip[@]}" install -e ".[$extra,energy]"
else
    echo "no NVIDIA driver: installing torch as constraints-cpu.txt pins it"
    # The common Linux wheel brings CUDA along. PyTorch has an index of builds for CPUs alone: TORCH_INDEX_URL names it.
    "${pip[@]}" install --constraint constraints-cpu.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} torch
    "${pip[@]}" install --constraint constraints-cpu.txt -e ".[$extra]"
fi
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
