#!/usr/bin/env bash
# Pre-train NeoBERT, stage 1: a million iterations on sequences of 1,024 tokens, on all GPUs of this machine.
#
#   bash examples/stage1.sh CORPUS TOKENIZER RUN [flags]
#
#   bash examples/stage1.sh corpus/refinedweb_content_document bert-base-uncased/vocab.txt runs/stage1 --dry-run
#
# Flags override the recipe, examples/configs/neobert_stage1.yaml. The same command resumes the run after a stop.
# On Slurm: sbatch examples/slurm/pretrain.sh --config examples/configs/neobert_stage1.yaml, and the flags below.
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
if (($# < 3)); then usage >&2; exit 2; fi
here=$(dirname "${BASH_SOURCE[0]}")
corpus=$1 tokenizer=$2 run=$3
shift 3
exec bash "$here/pretrain_neobert.sh" --config "$here/configs/neobert_stage1.yaml" \
    --data-path "$corpus" --tokenizer-model "$tokenizer" --save "$run" --load "$run" "$@"
