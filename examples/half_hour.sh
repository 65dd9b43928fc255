#!/usr/bin/env bash
# From Parquet files to an evaluated model: within thirty minutes on one H100 or H200, within two hours on two CPU cores:
#
#   bash examples/half_hour.sh DATA TOKENIZER RUN [GLUE]
#
# DATA is a folder of Parquet files with the column `content`; the last file is held out for the pseudo-perplexity.
# TOKENIZER is a vocabulary, a tokenizer folder or a model of the Hub, such as bert-base-uncased. RUN is the folder of all results.
# GLUE is a folder with SST-2, CoLA and RTE (docs/evaluation.md); without it, these tasks are left out.
#
# The script preprocesses the files, trains half_hour.yaml (without a GPU: cpu_hour.yaml), stops halfway and resumes,
# converts the checkpoints at an eighth, a quarter, a half and the end of the run, verifies the last, and evaluates each
# beside the same model untrained. SEEDS="0 1 2" are the seeds of the word order, CoLA and RTE. The same command skips
# finished stages.
set -euo pipefail

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
if [[ ${1-} == -h || ${1-} == --help ]]; then usage; exit 0; fi
if (($# < 3 || $# > 4)); then usage >&2; exit 2; fi
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
mkdir -p "$3"
run=$(cd "$3" && pwd -P)
data=$1 tokenizer=$2 glue=${4-}
export PYTHON=${PYTHON:-python3}
if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    config=$repository/examples/configs/half_hour.yaml dtype=bfloat16 rate=1e-4 texts=400
else # an hour of training on two cores
    config=$repository/examples/configs/cpu_hour.yaml dtype=float32 rate=3e-4 texts=100
    export NPROC_PER_NODE=${NPROC_PER_NODE:-2}
fi
config=${CONFIG:-$config}
neobert() { "$PYTHON" -m megatron_neobert "$@"; }
stage() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

stage "Preprocessing"
mapfile -t files < <(printf '%s\n' "$data"/*.parquet)
if ((${#files[@]} < 2)); then echo "half_hour: $data has fewer than two Parquet files" >&2; exit 66; fi
held_out=${files[-1]}
unset 'files[-1]'
[[ -e $run/corpus_content_document.json ]] || neobert preprocess --input "${files[@]}" --output-prefix "$run/corpus" \
    --tokenizer-model "$tokenizer" --workers "$(nproc)"

train() {
    bash "$repository/examples/pretrain_neobert.sh" --config "$config" --data-path "$run/corpus_content_document" \
        --tokenizer-model "$tokenizer" --async-save "$@"
}
iterations=$(sed -n 's/^ *train_iters: *\([0-9]*\).*/\1/p' "$config")
stage "Training: $iterations iterations, with a stop halfway"
status=0
train --save "$run/training" --load "$run/training" --exit-interval $((iterations / 2)) || status=$?
if [[ $status == 75 ]]; then
    stage "Resuming after the stop"
    status=0
    train --save "$run/training" --load "$run/training" --exit-interval $((iterations / 2)) || status=$?
fi
[[ $status == 0 ]] || exit "$status"
# The control: one iteration at a rate that changes no weight.
train --save "$run/untrained" --load "$run/untrained" --train-iters 1 --lr 1e-12 --lr-warmup-iters 0 --lr-decay-iters 1 \
    --eval-iters 0 --phases '[]'

stage "Conversion"
models=("$run/models/untrained")
names=(untrained) runs=(untrained) numbers=(1) formats=(neobert)
for share in 8 4 2 1; do
    number=$((iterations / share))
    name=iteration-$(printf %07d "$number") # the report sorts by name
    models+=("$run/models/$name")
    names+=("$name") runs+=(training) numbers+=("$number") formats+=(neobert)
done
trained=${models[-1]}
names+=(eurobert) runs+=(training) numbers+=("$iterations") formats+=(eurobert)
processes=()
for i in "${!names[@]}"; do # at the same time, because most of a conversion is the start of Python
    [[ -e $run/models/${names[i]} ]] || neobert convert megatron-to-hf --load "$run/${runs[i]}" \
        --iteration "${numbers[i]}" --format "${formats[i]}" --output "$run/models/${names[i]}" &
    processes+=($!)
done
for process in "${processes[@]}"; do wait "$process"; done
neobert verify "$trained" "$run/models/eurobert"

stage "Word order${glue:+ and GLUE}: five models at a time"
[[ -e $run/word_order/swaps ]] || "$PYTHON" "$repository/examples/word_order.py" "$held_out" "$run/word_order/swaps"
fine_tune() { # fine_tune MODEL: a process of its own, because small models leave most of a GPU idle
    local seeds common=(--model "$1" --output "$run/results" --batch-size 32 --learning-rate "$rate"
        --weight-decay 0.01 --max-length 128 --dtype "$dtype")
    read -ra seeds <<<"${SEEDS:-0}"
    neobert evaluate classify "${common[@]}" --data-dir "$run/word_order" --epochs 4 --seeds "${seeds[@]}"
    [[ -n $glue ]] || return 0
    common+=(--data-dir "$glue" --no-transfer)
    neobert evaluate glue "${common[@]}" --tasks cola --epochs 3 --seeds "${seeds[@]}"
    neobert evaluate glue "${common[@]}" --tasks rte --epochs 3 --seeds "${seeds[@]}"
    neobert evaluate glue "${common[@]}" --tasks sst2 --epochs 1
}
processes=()
for model in "${models[@]}"; do
    OMP_NUM_THREADS=$((($(nproc) + 4) / 5)) fine_tune "$model" >"$run/fine_tuning-${model##*/}.log" 2>&1 &
    processes+=($!)
done
for process in "${processes[@]}"; do wait "$process" || { tail -n 5 "$run"/fine_tuning-*.log >&2; exit 1; }; done

stage "Pseudo-perplexity of held-out texts, throughput, report"
neobert evaluate ppl --model "${models[@]}" --data "$held_out" --output "$run/results" --positions-per-doc 32 \
    --limit "$texts" --dtype "$dtype"
neobert evaluate throughput --model "$trained" --output "$run/results" --lengths 128 512 --batch-sizes 32 128 --dtype "$dtype"
neobert report --results "$run/results" --output "$run/report"
stage "Done: $run/report"
