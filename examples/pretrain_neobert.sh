#!/usr/bin/env bash
''':'
# Pre-trains a NeoBERT encoder. One file, two ways to start it:
#
#   bash examples/pretrain_neobert.sh [flags]                            one rank per GPU, or NPROC_PER_NODE ranks
#   torchrun --nproc-per-node N examples/pretrain_neobert.sh [flags]     the ranks that you ask for
#
# Several nodes: the same command on each, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set.
# Flags: see --help. A run is described by its YAML file and what differs from it:
#
#   bash examples/pretrain_neobert.sh --config examples/configs/tiny.yaml --data-path CORPUS --tokenizer-model DIR \
#        --save runs/first --load runs/first
#
# The same command continues a run that was stopped (exit code 75) or killed.
#
# Python: $PYTHON, else that of the active environment, else .venv of this repository, else python3.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} # before any copy that is installed
own=$checkout/.venv/bin/python
active=${VIRTUAL_ENV-}
if [[ ${CONDA_DEFAULT_ENV-base} != base ]]; then active=${CONDA_PREFIX-}; fi
if [[ -z "${PYTHON-}$active" && -x "$own" ]]; then PYTHON=$own; fi
PYTHON=${PYTHON:-python3}
if ! problem=$("$PYTHON" -c 'import megatron_neobert.config.cli' 2>&1); then
    echo "error: $PYTHON cannot run this (${problem##*$'\n'}); make an environment with tools/prepare_environment.sh" >&2
    exit 69
fi
exec "$PYTHON" -m megatron_neobert.launch "$0" "$@"
'''

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import run_command
from megatron_neobert.pretrain import main

if __name__ == "__main__":
    run_command(main)
