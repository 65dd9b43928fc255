#!/usr/bin/env bash
# Stage 1 on the eight GPUs of one machine.
#
#   bash examples/eight_gpus.sh CORPUS TOKENIZER RUN [flags]
#
# The model of 250 million parameters fits on each GPU, so every rank takes rows of its own (data parallelism), and only
# the optimizer's state is divided. docs/cluster.md explains several machines, and when to divide more.
set -euo pipefail

if [[ ${1-} == -h || ${1-} == --help ]]; then sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0; fi
NPROC_PER_NODE=8 exec bash "$(dirname "${BASH_SOURCE[0]}")/stage1.sh" "$@"
