#!/usr/bin/env bash
# Pre-train NeoBERT, stage 1, on the eight GPUs of one machine.
#
#   bash examples/eight_gpus.sh CORPUS TOKENIZER RUN [flags]
#
# The model of 250 million parameters fits on one GPU, so the run is data parallel, and only the optimizer state is
# sharded. docs/cluster.md explains several machines and other layouts.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0; fi
NPROC_PER_NODE=8 exec bash "$(dirname "${BASH_SOURCE[0]}")/stage1.sh" "$@"
