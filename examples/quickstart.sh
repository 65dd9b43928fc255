#!/usr/bin/env bash
# Train a tiny NeoBERT on this machine, from raw text to a model that fills masks:
#
#   bash examples/quickstart.sh [FOLDER]        FOLDER for all results; default: ./quickstart_run
#
# The corpus is the documentation of the installed Python packages. The script shows the whole path; the model is too
# small to be useful. The same command skips finished stages and resumes an interrupted training. Delete FOLDER to start
# again from the beginning.
set -euo pipefail

case "$*" in
-h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
-* | *" "-*) printf 'quickstart: unknown arguments %s; the only one is a folder\n' "$*" >&2; exit 2 ;;
esac
if (($# > 1)); then printf 'quickstart: %d arguments, %s; the only one is a folder\n' $# "$*" >&2; exit 2; fi
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
mkdir -p "${1:-quickstart_run}"
folder=$(cd "${1:-quickstart_run}" && pwd -P)

stage() { printf '\n== %s\n   %s\n' "$1" "$2"; }
run() { # run FILE COMMAND...: skip the command if its output FILE exists
    if [[ -e $1 ]]; then echo "   already there: $1"; else "${@:2}"; fi
}

stage "1/7 Environment" "Python packages at the tested versions; the first time, pip downloads them, which takes minutes"
python=$(bash "$repository/tools/prepare_environment.sh")
export PYTHON=$python # for examples/pretrain_neobert.sh
echo "   $python"
started=$SECONDS

stage "2/7 Corpus" "documentation of the installed packages, in parquet files with the columns of RefinedWeb"
run "$folder/texts" "$python" -m megatron_neobert sample-corpus --output "$folder/texts"

stage "3/7 Tokenizer" "a WordPiece vocabulary, trained on the corpus"
run "$folder/tokenizer/tokenizer.json" "$python" -m megatron_neobert train-tokenizer \
    --input "$folder/texts/*.parquet" --output "$folder/tokenizer" --vocab-size 8192

stage "4/7 Preprocessing" "token ids of whole documents, in Megatron's .bin and .idx format"
run "$folder/corpus_content_document.json" "$python" -m megatron_neobert preprocess \
    --input "$folder/texts/*.parquet" --output-prefix "$folder/corpus" --tokenizer-model "$folder/tokenizer" --workers 2

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    ranks=1 device="one GPU"
else
    ranks=2 device="two CPU ranks"
fi
pretrain() {
    NPROC_PER_NODE=$ranks bash "$repository/examples/pretrain_neobert.sh" \
        --config "$repository/examples/configs/tiny.yaml" --data-path "$folder/corpus_content_document" \
        --tokenizer-model "$folder/tokenizer" --save "$folder/checkpoints" --load "$folder/checkpoints" \
        --exit-interval 250
}
stage "5/7 Pretraining" "a NeoBERT with 2 layers on $device; it stops halfway, and the same command resumes it"
status=0
pretrain || status=$?
if [[ $status == 75 ]]; then
    echo "   exit code 75: stopped early, as requested. The same command again:"
    status=0
    pretrain || status=$?
fi
[[ $status == 0 ]] || exit "$status"

stage "6/7 Conversion" "the last checkpoint, as a Hugging Face folder that needs no remote code"
run "$folder/model" "$python" -m megatron_neobert convert megatron-to-hf \
    --load "$folder/checkpoints" --output "$folder/model"

stage "7/7 Fill-mask" 'transformers.pipeline("fill-mask"): the three most probable tokens'
HF_HUB_OFFLINE=1 "$python" - "$folder" <<'END'
import math
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
from megatron_neobert.inspection.plot import read_run, series
from transformers import pipeline
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
folder = Path(sys.argv[1])
fill_mask = pipeline("fill-mask", model=str(folder / "model"), device="cpu")
# Sentences that are frequent in the corpus, because the model is tiny.
for sentence in (
    ">>> [MASK] transformers import pipeline",
    "tuple of (`[MASK].Tensor`, `float`), containing the inverse frequencies for the RoPE embeddings",
    "The number of output features is equal to the [MASK] of input planes.",
):
    answers = ", ".join(f"{answer['token_str']} {answer['score']:.2f}" for answer in fill_mask(sentence, top_k=3))
    print(f"   {sentence}  ->  {answers}")

run = read_run(folder / "checkpoints", name="quickstart")
(_, losses), (_, validation) = series(run, "loss"), series(run, "validation_loss")
vocab_size = len(fill_mask.tokenizer)
print("\n== Summary")
print(f"   loss         {losses[0]:.2f} -> {losses[-1]:.2f} nats per masked token, {validation[-1]:.2f} on held-out documents;")
print(f"                random guessing among {vocab_size:,} tokens has the loss ln V = {math.log(vocab_size):.2f}")
END
"$python" -m megatron_neobert plot "$folder/checkpoints" --output "$folder/plots" >/dev/null
cat <<END
   corpus       $folder/corpus_content_document.bin, .idx, .json
   tokenizer    $folder/tokenizer
   checkpoints  $folder/checkpoints
   curves       $folder/plots/curves.png
   model        $folder/model
   time         $((SECONDS - started)) s, without the environment

   next, with your own texts (docs/tutorial.md explains each step):
         source "$(dirname "$python")/activate"
         neobert train-tokenizer --input 'YOUR_TEXTS/*' --output tokenizer
END
