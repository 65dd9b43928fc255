#!/usr/bin/env bash
# An encoder for another language or another kind of text: from raw shards to a tokenizer, a corpus and training.
#
#   bash examples/custom_language.sh INPUT OUTPUT [flags]
#
#   bash examples/custom_language.sh 'finnish/*.parquet' finnish_run --train-iters 100000
#
# INPUT: a pattern that names raw shards (parquet, JSON lines, WARC, text, ...). OUTPUT: where everything goes. Flags
# are those of training; the recipe is examples/configs/neobert_stage1.yaml. VOCAB_SIZE (30522), TEXT_KEY (content), WORKERS
# (the cores of this machine) and LOWERCASE=0 (keep capitals and accents) concern the steps before. Finished steps are
# skipped when the same command is started again, and training resumes. Afterwards:
#
#   neobert convert megatron-to-hf --load finnish_run/run --output finnish_run/model
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
if (($# < 2)); then usage >&2; exit 2; fi
project=$(dirname "${BASH_SOURCE[0]}")/..
input=$1 output=$2
shift 2
PYTHON=${PYTHON:-$(bash "$project/tools/prepare_environment.sh")}
export PYTHON # for stage1.sh
key=${TEXT_KEY:-content}
corpus=$output/corpus_${key}_document
mkdir -p "$output"

run() { # a finished step is recognised by what it leaves: run FILE COMMAND...
    if [[ -e $1 ]]; then echo "already there: $1"; else "${@:2}"; fi
}
case=--lowercase
if [[ ${LOWERCASE-1} == 0 ]]; then case=--no-lowercase; fi
run "$output/tokenizer/tokenizer.json" "$PYTHON" -m megatron_neobert train-tokenizer --input "$input" \
    --output "$output/tokenizer" --text-key "$key" --vocab-size "${VOCAB_SIZE:-30522}" "$case"
run "$corpus.json" "$PYTHON" -m megatron_neobert preprocess --input "$input" \
    --output-prefix "$output/corpus" --text-key "$key" --tokenizer-model "$output/tokenizer" \
    --workers "${WORKERS:-$(nproc)}" --resume
"$PYTHON" -m megatron_neobert validate "$corpus"
exec bash "$project/examples/stage1.sh" "$corpus" "$output/tokenizer" "$output/run" "$@"
