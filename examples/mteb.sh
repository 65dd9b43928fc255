#!/usr/bin/env bash
# Evaluate models on MTEB(eng, v1), the 56 tasks of the paper's Table 4.
#
# Once, on a machine with network access:
#     neobert fetch mteb --output mteb_data
# Then, on the machine with the GPU:
#     bash examples/mteb.sh mteb_data results MODEL_DIR [MODEL_DIR...]
#
# A model without fine-tuning for embeddings gets low scores; the paper fine-tunes every model first (neobert train-embedder).
# The same command skips finished tasks.
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
if (($# < 3)); then usage >&2; exit 2; fi
data_dir=$1 output=$2
shift 2
for model in "$@"; do
    neobert evaluate mteb --model "$model" --output "$output" --data-dir "$data_dir" \
        --benchmark "MTEB(eng, v1)" --instructions evaluation/mteb_instructions \
        --dtype "${DTYPE:-float16}" --batch-size "${BATCH_SIZE:-64}"
done
