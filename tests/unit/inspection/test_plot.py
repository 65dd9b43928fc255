"""`neobert plot`, and its reading of a metrics.jsonl that may be growing or have lines that were cut by a kill."""

import json
import math

import pytest
from commands import call

from megatron_neobert.inspection.plot import read_run, series


def line(iteration, **values):
    return json.dumps({"iteration": iteration, "cursor": {"sequence": 1}, "time": "2030-01-01", **values}) + "\n"


def interval(iteration, loss=2.0, **more):
    return line(iteration, loss=loss, lr=1e-3, consumed_tokens=1000 * iteration, **more)


def read(tmp_path, *lines):
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return read_run(tmp_path, name="r")


def test_lines_of_one_iteration_are_merged(tmp_path):
    run = read(tmp_path, interval(10), line(20, skipped_iterations=1), interval(20), line(20, validation_loss=3.0))
    assert list(run.values) == [10, 20]
    assert run.values[20] == {
        "loss": 2.0, "lr": 1e-3, "consumed_tokens": 20000, "skipped_iterations": 1, "validation_loss": 3.0
    }  # fmt: skip
    assert series(run, "validation_loss") == ([20], [3.0])


def test_a_run_that_went_back_in_place_shows_nothing_of_the_abandoned_iterations(tmp_path):
    before = [line(0, start=True), interval(10, 5.0), interval(20, validation_loss=3.0), interval(30, 3.0)]
    run = read(tmp_path, *before, interval(20)[:-30] + line(10, start=True), interval(20, 4.5))
    assert run.values.keys() == {10, 20}
    assert series(run, "loss") == ([10, 20], [5.0, 4.5])
    assert series(run, "validation_loss") == ([], [])


def test_a_line_that_is_being_written_or_was_cut_is_dropped_and_the_rest_is_read(tmp_path):
    assert list(read(tmp_path, interval(10), interval(20)[:-30]).values) == [10]
    assert list(read(tmp_path, interval(10), interval(20)[:-1]).values) == [10, 20]  # whole, without its line feed
    run = read(tmp_path, interval(10), interval(20)[:-30] + interval(20, 7.0), interval(30))
    assert series(run, "loss") == ([10, 20, 30], [2.0, 7.0, 2.0])


@pytest.mark.parametrize(
    "written",
    [
        "[" * 100_000,
        '{"iteration": ' + "9" * 5000 + ', "loss": 1}',
        '{"iteration": -1, "loss": 1}',
        '{"loss": 1}',
        r'{"iteration": 20, "\u001b]0;owned\u0007": 1}',
        "\0",
    ],
)
def test_a_line_that_no_run_writes_is_dropped(tmp_path, written):
    assert list(read(tmp_path, interval(10), written + "\n", interval(30)).values) == [10, 30]


def test_only_finite_numbers_are_values(tmp_path):
    values = f'"a": 1e999, "b": NaN, "c": "1", "d": true, "e": [1], "f": {"9" * 400}, "h": 1e300, "g": 2'
    assert read(tmp_path, interval(10), f'{{"iteration": 20, {values}}}\n').values[20] == {"g": 2}


@pytest.mark.parametrize("name", ["a\ud800b", "\x1b[31mred", '=HYPERLINK("http://x")', "a b", "x" * 65, "", "\u5b9f"])
def test_only_words_are_names_of_metrics(tmp_path, name):
    values = {name: 1.0, "good_1": 2.0, "x" * 64: 3.0}
    assert read(tmp_path, interval(10), line(20, **values)).values[20] == {"good_1": 2.0, "x" * 64: 3.0}


def test_an_interval_without_a_loss_is_a_gap_in_the_curve(tmp_path):
    skipped = line(20, lr=1e-3, consumed_tokens=20000)
    iterations, losses = series(read(tmp_path, interval(10), skipped, interval(30)), "loss")
    assert iterations == [10, 20, 30] and math.isnan(losses[1])


# --- the command, as a user starts it


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the runs a and b, which still train."""
    monkeypatch.chdir(tmp_path)
    for name, last in (("a", 40), ("b", 30)):
        (tmp_path / name).mkdir()
        lines = [interval(iteration, 10 / iteration) for iteration in range(10, last + 1, 10)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines) + '{"iteration": 5')
    return tmp_path


def test_runs_that_still_train_are_drawn_without_a_display(folder):
    code, printed, errors = call("plot", "a", "b/metrics.jsonl", "--output", "new/plots")
    assert (code, errors) == (0, "")
    expected = ["a: iteration 40 | loss 0.2500 nats", "b/metrics.jsonl: iteration 30 | loss 0.3333 nats"]
    assert printed.splitlines()[:2] == expected
    (figure,) = (folder / "new" / "plots").iterdir()
    assert figure.name == "curves.png" and figure.read_bytes()[:4] == b"\x89PNG"


def test_legend_names_validation_only_if_a_run_has_one_and_the_figure_is_in_the_current_folder(folder, monkeypatch):
    names = []
    monkeypatch.setattr("megatron_neobert.evaluation.plots.add_legend", lambda *items, **_: names.append(items[2]))
    assert call("plot", "a")[0] == 0
    (folder / "a" / "metrics.jsonl").write_text(interval(10) + line(10, validation_loss=3.0))
    assert call("plot", "a", "b")[1].endswith("wrote curves.png\n")
    assert call("plot", "a", "--metrics", "lr")[0] == 0
    assert names == [["a"], ["a", "b", "validation"], ["a"]]
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_control_characters_in_names_do_not_reach_the_terminal(folder):
    name = "\x1b[31mred\udc80\u5b9f"
    (folder / "a").rename(folder / name)
    with pytest.warns(UserWarning, match="Glyph 23455 .* missing from font"):
        _, printed, _ = call("plot", name, "--output", "p")
    assert r"\x1b[31mred\udc80" in printed and "\x1b" not in printed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((".",), 66, "holds no metrics.jsonl; name the folder given to --save"),
        (("nowhere",), 66, "nowhere does not exist"),
        (("cut",), 65, "has no whole line with an iteration and a value"),
        (("a", "--metrics", "bleu"), 2, "--metrics bleu was not logged by any of these runs. Choose from loss, lr"),
        (("a", "--output", "/proc"), 73, "--output /proc cannot be written"),
    ],
)
def test_runs_and_outputs_that_cannot_be_used_are_refused(folder, arguments, code, message):
    (folder / "cut").write_text(interval(10)[:-30])
    ended, _, errors = call("plot", "--output", "p", *arguments)
    assert ended == code and message in errors
    assert not (folder / "p").exists()
