#!/usr/bin/env bash
''':'
# Pre-train a NeoBERT encoder. This file is a shell script and a Python program, so there are two ways to start it:
#
#   bash examples/pretrain_neobert.sh [flags]                            one rank per GPU, or NPROC_PER_NODE ranks
#   torchrun --nproc-per-node N examples/pretrain_neobert.sh [flags]     N ranks
#
# On several nodes, start the same command on each with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set.
# --help lists the flags, which override a YAML file:
#
#   bash examples/pretrain_neobert.sh --config examples/configs/tiny.yaml --data-path CORPUS --tokenizer-model DIR \
#        --save runs/first --load runs/first
#
# The same command resumes a run that was stopped (exit code 75) or killed.
#
# Python is $PYTHON, or the Python of the active environment, or .venv of this repository, or python3.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} # this checkout, not an installed package
venv_python=$checkout/.venv/bin/python
active=${VIRTUAL_ENV-}
if [[ ${CONDA_DEFAULT_ENV-base} != base ]]; then active=${CONDA_PREFIX-}; fi
if [[ -z "${PYTHON-}$active" && -x "$venv_python" ]]; then PYTHON=$venv_python; fi
PYTHON=${PYTHON:-python3}
if ! problem=$("$PYTHON" -c 'import megatron_neobert.config.cli' 2>&1); then
    echo "error: $PYTHON cannot run this (${problem##*$'\n'}); run bash tools/prepare_environment.sh" >&2
    exit 69
fi
exec "$PYTHON" -m megatron_neobert.launch "$0" "$@"
'''

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed package

from megatron_neobert.errors import run_command
from megatron_neobert.pretrain import main

if __name__ == "__main__":
    run_command(main)
