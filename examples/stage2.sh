#!/usr/bin/env bash
# Pre-train NeoBERT, stage 2: 50,000 more iterations on sequences of 4,096 tokens, from the last checkpoint of stage 1.
#
#   bash examples/stage2.sh CORPUS TOKENIZER STAGE1_RUN RUN [flags]
#
#   bash examples/stage2.sh corpus/refinedweb_content_document bert-base-uncased/vocab.txt runs/stage1 runs/stage2
#
# The blend takes 20 % of its documents from the whole corpus of stage 1, 40 % from its documents of at least 1,024
# tokens, and 40 % from those of at least 2,048. Flags override the recipe, examples/configs/neobert_stage2.yaml. The
# same command resumes the run after a stop.
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
if (($# < 4)); then usage >&2; exit 2; fi
here=$(dirname "${BASH_SOURCE[0]}")
corpus=$1 tokenizer=$2 stage1=$3 run=$4
shift 4
exec bash "$here/pretrain_neobert.sh" --config "$here/configs/neobert_stage2.yaml" \
    --data-path 0.2 "$corpus" 0.4 "$corpus:min=1024" 0.4 "$corpus:min=2048" --tokenizer-model "$tokenizer" \
    --continue-from "$stage1" --save "$run" --load "$run" "$@"
