"""GLUE's rows are read as they are, from each of the forms in which they are handed round."""

from pathlib import Path

import datasets
import pytest

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.glue.tasks import DIAGNOSTIC, TASKS, GlueSplit, check_rows, read_split

PAIRS = [("a cat", "cats"), ("a mat", "cats"), ("on", "off")]


def write_tsv(folder: Path, title: str, **files: str) -> Path:
    (folder / title).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / title / f"{name}.tsv").write_text(content, encoding="utf-8", newline="")
    return folder


def test_bare_quotes_and_strange_line_ends_stay_in_the_text(tmp_path):
    write_tsv(tmp_path, "SST-2", train='sentence\tlabel\n"cat sat\t1\non " a mat\x85\u2028.\t0\r\n')
    found = read_split(tmp_path, TASKS["sst2"], "train")
    assert found == GlueSplit([('"cat sat',), ('on " a mat\x85\u2028.',)], [1, 0])


def test_file_without_a_header_is_read_by_the_places_of_its_columns(tmp_path):
    write_tsv(tmp_path, "CoLA", train="gj04\t1\t\tthe cat sat\ngj04\t0\t*\tcat the sat\n")
    assert read_split(tmp_path, TASKS["cola"], "train") == GlueSplit([("the cat sat",), ("cat the sat",)], [1, 0])


def test_columns_of_the_benchmark_have_other_names_than_on_the_hub(tmp_path):
    write_tsv(tmp_path, "MRPC", dev="\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta cat\tcats\n")
    write_tsv(tmp_path, "QQP", dev="id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n3\t1\t2\twhy\thow\t0\n")
    write_tsv(tmp_path, "MNLI", dev_mismatched="index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tx\tneutral\n")
    write_tsv(tmp_path, "STS-B", train="index\tsentence1\tsentence2\tscore\n0\ta\tb\t3.800\n")
    write_tsv(tmp_path, "diagnostic", diagnostic="index\tsentence1\tsentence2\n0\ta cat\tcats\n")
    assert read_split(tmp_path, TASKS["stsb"], "train").labels == [3.8]
    assert read_split(tmp_path, DIAGNOSTIC, "test", labelled=False).texts == [("a cat", "cats")]
    assert read_split(tmp_path, TASKS["mrpc"], "validation") == GlueSplit([("a cat", "cats")], [1])
    assert read_split(tmp_path, TASKS["qqp"], "validation") == GlueSplit([("why", "how")], [0])
    assert read_split(tmp_path, TASKS["mnli"], "validation_mismatched") == GlueSplit([("a", "b")], [1])


def test_part_of_the_training_set_kept_as_val_is_put_back(tmp_path):
    header = "index\tsentence1\tsentence2\tlabel\n"
    rows = [f"{number}\t{a}\t{b}\tentailment\n" for number, (a, b) in enumerate(PAIRS)]
    write_tsv(tmp_path, "RTE", train=header + rows[0] + rows[1], val=rows[2], dev=header + rows[0])
    assert read_split(tmp_path, TASKS["rte"], "train").texts == PAIRS
    assert read_split(tmp_path, TASKS["rte"], "validation").texts == PAIRS[:1]


def test_labelled_test_file_of_sst2_is_the_benchmarks_dev_set(tmp_path):
    files = {name: f"sentence\tlabel\n{name}\t1\n" for name in ("train", "dev", "test")}
    write_tsv(tmp_path, "SST-2", **files)
    assert read_split(tmp_path, TASKS["sst2"], "train").texts == [("train",), ("dev",)]
    assert read_split(tmp_path, TASKS["sst2"], "validation").texts == [("test",)]
    with pytest.raises(MissingInputError, match=r"SST-2 has no test set: its test\.tsv is .*neobert fetch glue"):
        read_split(tmp_path, TASKS["sst2"], "test", labelled=False)
    write_tsv(tmp_path, "SST-2", test="index\tsentence\n0\tunlabelled\n")  # the benchmark's own
    assert read_split(tmp_path, TASKS["sst2"], "validation").texts == [("dev",)]
    assert read_split(tmp_path, TASKS["sst2"], "test", labelled=False) == GlueSplit([("unlabelled",)], None)


def test_parquet_and_saved_data_sets_give_what_the_tsv_file_gives(tmp_path):
    lines = [f"{number}\t{a}\t{b}\tnot_entailment" for number, (a, b) in enumerate(PAIRS)]
    tsv = write_tsv(tmp_path, "RTE", train="\n".join(["index\tsentence1\tsentence2\tlabel", *lines]))
    first, second = zip(*PAIRS, strict=True)
    rows = datasets.Dataset.from_dict({"sentence1": first, "sentence2": second, "label": [1] * 3, "idx": range(3)})
    (tmp_path / "parquet" / "rte").mkdir(parents=True)
    for number in range(2):
        path = tmp_path / "parquet" / "rte" / f"train-0000{number}-of-00002.parquet"
        rows.select(range(3)[number * 2 : number * 2 + 2]).to_parquet(str(path))
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved" / "rte"))
    expected = GlueSplit(PAIRS, [1, 1, 1])
    found = [read_split(place, TASKS["rte"], "train") for place in (tsv, tmp_path / "parquet", tmp_path / "saved")]
    assert found == [expected] * 3


def test_rows_that_are_cut_short_are_left_out_with_a_warning(tmp_path):
    write_tsv(tmp_path, "SST-2", train="sentence\tlabel\ncat\t1\nmat\nsat\t0\n")
    with pytest.warns(UserWarning, match="1 rows are cut short"):
        assert read_split(tmp_path, TASKS["sst2"], "train").texts == [("cat",), ("sat",)]


def test_test_set_with_a_row_cut_short_is_refused_because_answers_go_by_number(tmp_path):
    write_tsv(tmp_path, "RTE", test="index\tsentence1\tsentence2\n0\ta\tb\n1\ta\n2\ta\tb\n")
    with pytest.raises(DataError, match=r"test\.tsv: row 1 \(from 0\) is cut short"):
        read_split(tmp_path, TASKS["rte"], "test", labelled=False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("sentence\tlabel\ncat\t2\n", "'2' is no SST-2 label; they are 0, 1"),
        ("text\tlabel\tmore\ncat\t1\t3\n", "3 fields; a SST-2 file has the columns sentence, label"),
        ("sentence\tlabel\n", "0 fields"),
        ("", "0 fields"),
        ("sentence\ncat\n", "train has no column of labels"),
    ],
)
def test_file_of_another_form_is_refused_with_what_it_has(tmp_path, content, reason):
    write_tsv(tmp_path, "SST-2", train=content)
    with pytest.raises(DataError, match=reason):
        read_split(tmp_path, TASKS["sst2"], "train")


def test_missing_task_and_missing_split_are_named_with_the_command_that_fetches_them(tmp_path):
    with pytest.raises(MissingInputError, match=r"no folder QNLI or qnli.*neobert fetch glue"):
        read_split(tmp_path, TASKS["qnli"], "train")
    write_tsv(tmp_path, "QNLI", dev="index\tquestion\tsentence\tlabel\n")
    with pytest.raises(MissingInputError, match=r"no train\.parquet and no train\.tsv.*neobert fetch glue"):
        read_split(tmp_path, TASKS["qnli"], "train")


def test_number_of_rows_that_is_not_the_benchmarks_is_said_with_both():
    with pytest.warns(UserWarning, match="RTE train has 2,127 rows, the benchmark 2,490"):
        check_rows(TASKS["rte"], "train", 2_127)


def test_limit_takes_rows_from_all_over_the_split():
    rows = GlueSplit([(str(number),) for number in range(10)], list(range(10)))
    assert rows.spread(4).labels == [0, 2, 5, 7]
    assert rows.spread(10) == rows.spread(None) == rows


@pytest.mark.filterwarnings("error")  # check_rows warns
@pytest.mark.parametrize("task", ["cola", "sst2", "rte", "wnli"])
def test_real_files_have_the_benchmarks_rows(shared_data, task):
    for split in ("train", "validation"):
        found = read_split(shared_data / "glue", TASKS[task], split)
        check_rows(TASKS[task], split, len(found.texts))
        assert set(found.labels) == {0, 1}
