# nanosprint with CUDA, for one host or many.
#
#   docker build -t nanosprint .
#   docker run --rm nanosprint                                       the quickstart, which needs no GPU: is all there?
#   docker run --rm --gpus all --ipc host -v "$PWD/data:/work/data" -v "$PWD/runs:/work/runs" nanosprint \
#       nanosprint train record --gpus 8
#
# --ipc host, since NCCL's processes share memory. Mounted folders must be writable for user 1000.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04

# Triton compiles its launchers at run time: a C compiler and Python's headers. Ubuntu 24.04 keeps these at 3.12 and 13.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# Ubuntu's image has a user 1000, "ubuntu". Its folder of runs and data is /work.
RUN mkdir --parents /work/data /work/runs /opt/nanosprint && chown -R ubuntu:ubuntu /work /opt/nanosprint
USER 1000
ENV PATH=/opt/nanosprint/.venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Versions first: an edit of the code then costs no download.
WORKDIR /opt/nanosprint
COPY --chown=ubuntu:ubuntu constraints-gpu.txt ./
RUN python3.12 -m venv .venv && .venv/bin/pip install --requirement constraints-gpu.txt
COPY --chown=ubuntu:ubuntu pyproject.toml README.md LICENSE ./
COPY --chown=ubuntu:ubuntu scripts scripts
COPY --chown=ubuntu:ubuntu nanosprint nanosprint
RUN .venv/bin/pip install --constraint constraints-gpu.txt --editable '.[quickstart,data,energy]'

# The folder that commands run in; scripts find their own.
WORKDIR /work
CMD ["/opt/nanosprint/scripts/quickstart.sh", "/opt/nanosprint/.venv/bin/nanosprint", "/work/runs/quickstart"]
