#!/usr/bin/env bash
# Evaluate models on GLUE by the paper's protocol: a grid of 60 points on each of eight tasks.
#
# Once, on a machine with network access:
#     hf download nyu-mll/glue --repo-type dataset --local-dir glue
# Then, on the machine with the GPUs:
#     bash examples/glue.sh glue results MODEL_DIR [MODEL_DIR...]
#
# MNLI comes first, because RTE, MRPC, STS-B and QNLI start from its best model. GRID=best uses the paper's best point
# of each task instead of the grid, and GRID=small the grid of its ablations. JOBS is the number of parallel runs, one
# per GPU. SEEDS="0 1 2" gives means with deviations. The same command skips finished runs.
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
