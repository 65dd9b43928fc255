"""GLUE's rows are read as they are, from each of the forms in which they are distributed."""

import json
from pathlib import Path

import datasets
import pytest

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.glue import TASKS, GlueSplit, read_task

pytestmark = pytest.mark.filterwarnings("ignore:.*rows, the benchmark:UserWarning")
ROWS = {
    "sentence1": ['a "cat", sat', "12"],
    "sentence2": ["one\nline", "off\x85\u2028."],
    "label": [1, 0],
    "idx": [0, 1],
}


def write(folder: Path, name: str, content: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content, encoding="utf-8", newline="")
    return folder


def write_parquet(folder: Path) -> None:
    for number, row in enumerate(datasets.Dataset.from_dict(ROWS)):
        one = datasets.Dataset.from_list([row])
        one.to_parquet(str(folder / f"train-0000{number}-of-00002.parquet"))


def write_json_lines(folder: Path) -> None:
    rows = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
    write(folder, "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def write_csv(folder: Path) -> None:
    rows = '"a ""cat"", sat","one\nline",not_entailment\r\n12,off\x85\u2028.,entailment\r\n'
    write(folder, "train.csv", f"\ufeffsentence1,sentence2,label\r\n{rows}")


def save_data_set(folder: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(ROWS)}).save_to_disk(str(folder))


@pytest.mark.parametrize("form", [write_parquet, write_json_lines, write_csv, save_data_set])
@pytest.mark.parametrize("name", ["RTE", "rte"])
def test_every_form_gives_the_same_rows(tmp_path, form, name):
    (tmp_path / name).mkdir()
    form(tmp_path / name)
    texts = list(zip(ROWS["sentence1"], ROWS["sentence2"], strict=True))
    found = read_task(tmp_path, TASKS["rte"], "train")
    assert (found.texts, found.labels) == (texts, [1, 0])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("sentence,label\ncat,2\n", "2 is no SST-2 label; they are 0, 1"),
        ("sentence,label\ncat,\n", "None is no SST-2 label"),
        ("text,label\ncat,1\n", "train has the columns text, label, but no sentence"),
        ("sentence,label\ncat,1\nmat\n", "Expected 2 columns, got 1: mat"),
        ("sentence,label\n", "train has no rows"),
        ("", "Empty CSV file"),
        ("sentence\ncat\n", "train has the columns sentence, but no label"),
    ],
)
def test_file_of_another_form_is_refused_with_what_it_has(tmp_path, content, reason):
    write(tmp_path, "SST-2/train.csv", content)
    with pytest.raises(DataError, match=reason):
        read_task(tmp_path, TASKS["sst2"], "train")


def test_only_scores_are_numbers_and_a_score_that_is_none_is_refused(tmp_path):
    write(tmp_path, "STS-B/train.csv", "sentence1,sentence2,label\n1912,b,3.800\n")
    scored = read_task(tmp_path, TASKS["stsb"], "train")
    assert (scored.texts, scored.labels) == ([("1912", "b")], [3.8])
    write(tmp_path, "STS-B/train.csv", "sentence1,sentence2,label\na,b,high\n")
    with pytest.raises(DataError, match="is no STS-B score; they go from 0 to 5"):
        read_task(tmp_path, TASKS["stsb"], "train")


def test_missing_task_and_missing_split_are_named_with_the_command_that_fetches_them(tmp_path):
    with pytest.raises(MissingInputError, match=r"no folder QNLI or qnli.*hf download"):
        read_task(tmp_path, TASKS["qnli"], "train")
    write(tmp_path, "QNLI/train.tsv", "index\tquestion\tsentence\tlabel\n")
    with pytest.raises(
        MissingInputError, match=r"no train\.parquet, .* or train\.csv.*hf download.*TSV files are not read"
    ):
        read_task(tmp_path, TASKS["qnli"], "train")


def test_number_of_rows_that_is_not_the_benchmarks_is_said_with_both(tmp_path):
    write(tmp_path, "RTE/train.csv", "sentence1,sentence2,label\na,b,1\n")
    with pytest.warns(UserWarning, match="RTE train has 1 rows, the benchmark 2,490"):
        read_task(tmp_path, TASKS["rte"], "train")


def test_limit_takes_rows_from_all_over_the_split():
    rows = GlueSplit([(str(number),) for number in range(10)], list(range(10)))
    assert rows.spread(4).labels == [0, 2, 5, 7]
    assert rows.spread(10) == rows.spread(None) == rows
