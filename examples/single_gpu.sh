#!/usr/bin/env bash
# Pre-train NeoBERT, stage 1, on one GPU.
#
#   bash examples/single_gpu.sh CORPUS TOKENIZER RUN [flags]
#
# The global batch is the same as on eight GPUs, in 64 micro-batches of 32 packed sequences, so the losses are the same.
# If memory is short, use --micro-batch-size 8 or recompute activations (docs/cluster.md). CUDA_VISIBLE_DEVICES selects
# the GPU.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0; fi
NPROC_PER_NODE=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/stage1.sh" "$@"
