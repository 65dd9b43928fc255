"""Reading of a metrics.jsonl that may be growing or have lines that were cut by a kill, as `neobert plot` does."""

import json
import math

import pytest

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.inspection.plot import read_run, series


def interval(iteration, loss=2.0, **more):
    values = {"loss": loss, "lr": 1e-3, "consumed_tokens": 1000 * iteration, **more}
    return json.dumps({"iteration": iteration, "cursor": {"row": iteration}, "time": "2030-01-01", **values}) + "\n"


def validation(iteration, loss=3.0):
    return json.dumps({"iteration": iteration, "cursor": {}, "validation_loss": loss}) + "\n"


def skip(iteration, count):
    return json.dumps({"iteration": iteration, "cursor": {}, "skipped_iterations": count}) + "\n"


def read(tmp_path, *lines):
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return read_run(tmp_path, name="r")


def test_lines_of_one_iteration_are_merged(tmp_path):
    run = read(tmp_path, interval(10), skip(20, 1), interval(20, skipped_iterations=1), validation(20))
    assert list(run.values) == [10, 20]
    assert run.values[20] == {
        "loss": 2.0, "lr": 1e-3, "consumed_tokens": 20000, "skipped_iterations": 1, "validation_loss": 3.0
    }  # fmt: skip
    assert series(run, "validation_loss") == ([20], [3.0])


def test_iterations_that_a_resumed_run_repeats_replace_the_earlier_ones(tmp_path):
    before = [interval(10, 5.0), interval(20, 4.0), validation(20), interval(30, 3.0)]
    run = read(tmp_path, *before, interval(20, 4.5), validation(20, 2.5), interval(30, 3.5))
    assert series(run, "loss") == ([10, 20, 30], [5.0, 4.5, 3.5])
    assert series(run, "validation_loss") == ([20], [2.5])


def test_a_line_that_is_being_written_or_was_cut_is_dropped_and_the_rest_is_read(tmp_path):
    assert list(read(tmp_path, interval(10), interval(20)[:-30]).values) == [10]
    assert list(read(tmp_path, interval(10), interval(20)[:-1]).values) == [10, 20]  # whole, without its line feed
    run = read(tmp_path, interval(10), interval(20)[:-30] + interval(20, 7.0), interval(30))
    assert series(run, "loss") == ([10, 20, 30], [2.0, 7.0, 2.0])


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"iteration": ' + "9" * 5000 + ', "loss": 1}',
        '{"iteration": -1, "loss": 1}',
        '{"loss": 1}',
        "\0",
    ],
)
def test_a_line_that_no_run_writes_is_dropped(tmp_path, line):
    assert list(read(tmp_path, interval(10), line + "\n", interval(30)).values) == [10, 30]


def test_only_finite_numbers_are_values(tmp_path):
    values = f'"a": 1e999, "b": NaN, "c": "1", "d": true, "e": [1], "f": {"9" * 400}, "h": 1e300, "g": 2'
    assert read(tmp_path, interval(10), f'{{"iteration": 20, {values}}}\n').values[20] == {"g": 2}


@pytest.mark.parametrize("name", ["a\ud800b", "\x1b[31mred", '=HYPERLINK("http://x")', "a b", "x" * 65, "", "\u5b9f"])
def test_only_words_are_names_of_metrics(tmp_path, name):
    line = json.dumps({"iteration": 20, name: 1.0, "good_1": 2.0, "x" * 64: 3.0}) + "\n"
    assert read(tmp_path, interval(10), line).values[20] == {"good_1": 2.0, "x" * 64: 3.0}


def test_an_interval_without_a_loss_is_a_gap_in_the_curve(tmp_path):
    skipped = json.dumps({"iteration": 20, "lr": 1e-3, "consumed_tokens": 20000}) + "\n"
    iterations, losses = series(read(tmp_path, interval(10), skipped, interval(30)), "loss")
    assert iterations == [10, 20, 30] and math.isnan(losses[1])


def test_a_folder_without_a_log_and_a_log_without_a_line_are_refused(tmp_path):
    with pytest.raises(MissingInputError, match=r"holds no metrics\.jsonl; name the folder given to --save"):
        read_run(tmp_path, name="r")
    with pytest.raises(MissingInputError, match="nowhere does not exist"):
        read_run(tmp_path / "nowhere", name="r")
    with pytest.raises(DataError, match="has no whole line with an iteration and a value"):
        read(tmp_path, interval(10)[:-30])
