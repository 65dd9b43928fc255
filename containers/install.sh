#!/usr/bin/env bash
# What both recipes of this folder run inside NVIDIA's PyTorch image, which brings torch, CUDA, cuDNN, NCCL and compilers.
#
#   bash install.sh engine           the virtual environment, and Transformer Engine compiled for the image's torch
#   bash install.sh project          this project and its dependencies, from the folder that it was copied to
#
# The image's torch stays: the environment sees the image's packages, and tools/prepare_environment.sh pins torch to the
# version that it finds. The image pins its own packages for pip too (PIP_CONSTRAINT), so that ours could not be
# installed beside them; the recipes empty it. Transformer Engine is replaced by a version that the tests
# cover; its extension fits one torch alone, so it is compiled here, in some 15 minutes of one core's time.
set -euo pipefail

case "${1-}" in
engine)
    # pip comes from the image: its Python may lack the module that puts one into a new environment.
    python3 -m venv --system-site-packages --without-pip "$VIRTUAL_ENV"
    cuda=$("$VIRTUAL_ENV/bin/python" -c 'import torch; print(torch.version.cuda.split(".")[0])')
    export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE CUDA_HOME=/usr/local/cuda
    "$VIRTUAL_ENV/bin/python" -m pip install --no-cache-dir --no-build-isolation \
        "transformer-engine[core_cu$cuda,pytorch]==2.11.0"
    ;;
project)
    PIP_NO_CACHE_DIR=1 bash "$(dirname "${BASH_SOURCE[0]}")/../tools/prepare_environment.sh"
    ;;
*)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
