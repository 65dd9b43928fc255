"""GLUE's rows are read unchanged from every supported file format."""

import json
from pathlib import Path

import datasets
import pytest

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.glue import TASKS, read_task

pytestmark = pytest.mark.filterwarnings("ignore:.*rows, the benchmark:UserWarning")
COLUMNS = {
    "sentence1": ['a "cat", sat', "12"],
    "sentence2": ["one\nline", "off\x85\u2028."],
    "label": [1, 0],
    "idx": [0, 1],
}


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content, encoding="utf-8", newline="")


def write_parquet(folder: Path) -> None:
    for number, row in enumerate(datasets.Dataset.from_dict(COLUMNS)):
        datasets.Dataset.from_list([row]).to_parquet(str(folder / f"train-0000{number}-of-00002.parquet"))


def write_json_lines(folder: Path) -> None:
    rows = datasets.Dataset.from_dict(COLUMNS).to_list()
    write(folder, "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def write_csv(folder: Path) -> None:
    lines = '"a ""cat"", sat","one\nline",not_entailment\r\n12,off\x85\u2028.,entailment\r\n'
    write(folder, "train.csv", f"\ufeffsentence1,sentence2,label\r\n{lines}")


def save_dataset(folder: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(COLUMNS)}).save_to_disk(str(folder))


@pytest.mark.parametrize("write_format", [write_parquet, write_json_lines, write_csv, save_dataset])
@pytest.mark.parametrize("name", ["RTE", "rte"])
def test_every_format_gives_the_same_rows(tmp_path, write_format, name):
    (tmp_path / name).mkdir()
    write_format(tmp_path / name)
    split = read_task(tmp_path, TASKS["rte"], "train")
    assert (split.texts, split.labels) == ([COLUMNS["sentence1"], COLUMNS["sentence2"]], [1, 0])


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("sst2", "sentence,label\ncat,2\n", r"2 is not a label of SST-2 \(0, 1\)"),
        ("sst2", "text,label\ncat,1\n", "train has the columns text, label, but no sentence"),
        ("sst2", "sentence,label\ncat,1\nmat\n", "Expected 2 columns, got 1: mat"),
        ("sst2", "sentence,label\n", "train has no rows"),
        ("stsb", "sentence1,sentence2,label\na,b,high\n", "'high' is not a score of STS-B"),
    ],
)
def test_file_with_other_columns_or_labels_is_refused(tmp_path, task, content, message):
    write(tmp_path, f"{TASKS[task].title}/train.csv", content)
    with pytest.raises(DataError, match=message):
        read_task(tmp_path, TASKS[task], "train")


def test_texts_stay_texts_and_scores_become_numbers(tmp_path):
    write(tmp_path, "STS-B/train.csv", "sentence1,sentence2,label\n1912,b,3.800\n")
    split = read_task(tmp_path, TASKS["stsb"], "train")
    assert (split.texts, split.labels) == ([["1912"], ["b"]], [3.8])


def test_missing_task_or_split_is_reported_with_the_download_command(tmp_path):
    with pytest.raises(MissingInputError, match=r"no folder QNLI or qnli.*hf download"):
        read_task(tmp_path, TASKS["qnli"], "train")
    write(tmp_path, "QNLI/train.tsv", "index\tquestion\tsentence\tlabel\n")
    with pytest.raises(
        MissingInputError, match=r"no train\.parquet, .* or train\.csv.*hf download.*TSV files are not read"
    ):
        read_task(tmp_path, TASKS["qnli"], "train")


def test_number_of_rows_that_differs_from_the_benchmarks_is_a_warning(tmp_path):
    write(tmp_path, "RTE/train.csv", "sentence1,sentence2,label\na,b,1\n")
    with pytest.warns(UserWarning, match="RTE train has 1 rows, the benchmark 2,490"):
        read_task(tmp_path, TASKS["rte"], "train")
