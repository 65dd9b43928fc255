#!/usr/bin/env bash
# GLUE by the paper's protocol for one or more models: its grid of 60 points on each of its eight tasks.
#
# On a machine with a network, once:
#     hf download nyu-mll/glue --repo-type dataset --local-dir glue
# Then, where the GPUs are:
#     bash examples/glue.sh glue results MODEL_DIR [MODEL_DIR...]
#
# MNLI comes first: RTE, MRPC, STS-B and QNLI start from its best model. GRID=best takes the paper's best point of each
# task instead of the grid, GRID=small the grid of its ablations. JOBS runs go on at a time, one per GPU; SEEDS="0 1 2"
# gives means with deviations. After a kill the same command resumes, with the runs that were not finished.
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
if (($# < 3)); then usage >&2; exit 2; fi
data_dir=$1 output=$2
shift 2
read -ra seeds <<<"${SEEDS:-0}"
for model in "$@"; do
    neobert evaluate glue --model "$model" --data-dir "$data_dir" --output "$output" \
        --grid "${GRID:-paper}" --seeds "${seeds[@]}" --jobs "${JOBS:-1}" --dtype "${DTYPE:-bfloat16}"
done
