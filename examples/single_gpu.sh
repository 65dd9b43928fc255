#!/usr/bin/env bash
# Stage 1 on one GPU.
#
#   bash examples/single_gpu.sh CORPUS TOKENIZER RUN [flags]
#
# The batches are those of eight GPUs, 64 micro-batches of 32 rows each, so the loss is the same and only slower. Where
# memory is short, give --micro-batch-size 8, or recompute: docs/cluster.md. CUDA_VISIBLE_DEVICES chooses the GPU.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0; fi
NPROC_PER_NODE=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/stage1.sh" "$@"
