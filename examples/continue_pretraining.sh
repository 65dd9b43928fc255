#!/usr/bin/env bash
# Continue pre-training of a published model on your own documents.
#
#   bash examples/continue_pretraining.sh MODEL_DIR CORPUS RUN [flags]
#
#   neobert preprocess --input 'mine/*.parquet' --output-prefix corpus/mine --tokenizer-model NeoBERT
#   bash examples/continue_pretraining.sh NeoBERT corpus/mine_content_document runs/continued
#
# MODEL_DIR contains config.json, model.safetensors and tokenizer files, as published or as neobert convert writes them.
# Code in this folder is not executed. The script converts the weights to a checkpoint once, in RUN.start. The recipe is
# examples/configs/neobert_continued.yaml, for the 28 x 768 model. Flags override its settings; neobert convert prints
# the flags that a model of another size needs. The same command resumes the run after a stop.
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
if (($# < 3)); then usage >&2; exit 2; fi
here=$(dirname "${BASH_SOURCE[0]}")
model=$1 corpus=$2 run=$3
shift 3
PYTHON=${PYTHON:-$(bash "$here/../tools/prepare_environment.sh")}
export PYTHON # for pretrain_neobert.sh
if [[ ! -e $run.start ]]; then
    "$PYTHON" -m megatron_neobert convert hf-to-megatron --load "$model" --output "$run.start"
fi
exec bash "$here/pretrain_neobert.sh" --config "$here/configs/neobert_continued.yaml" \
    --data-path "$corpus" --tokenizer-model "$model" --continue-from "$run.start" --save "$run" --load "$run" "$@"
