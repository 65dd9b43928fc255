#!/usr/bin/env bash
# Train an encoder for another language or domain: tokenizer, corpus and pre-training from raw text.
#
#   bash examples/custom_language.sh INPUT OUTPUT [flags]
#
#   bash examples/custom_language.sh 'finnish/*.parquet' finnish_run --train-iters 100000
#
# INPUT is a glob of input files (parquet, JSON lines, WARC, text, ...), and OUTPUT a folder for all results. The flags
# are those of neobert train and override the recipe examples/configs/neobert_stage1.yaml. Environment variables set the
# steps before training: VOCAB_SIZE (default 30522), TEXT_KEY (content), WORKERS (the cores of this machine) and
# LOWERCASE=0 (keep capitals and accents). The same command skips finished steps and resumes training. Afterwards:
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
export PYTHON # for pretrain_neobert.sh
key=${TEXT_KEY:-content}
corpus=$output/corpus_${key}_document
mkdir -p "$output"

run() { # run FILE COMMAND...: skip the command if its output FILE exists
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
exec bash "$project/examples/pretrain_neobert.sh" --config neobert_stage1 --data-path "$corpus" \
    --tokenizer-model "$output/tokenizer" --save "$output/run" --load "$output/run" "$@"
