"""Reading of a metrics.jsonl that may be growing or have lines that were cut by a kill, and its curves."""

import json
import math

import pytest
from matplotlib.colors import to_hex

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.plots import COLOURS
from megatron_neobert.inspection.plot import choose_metrics
from megatron_neobert.inspection.run_figure import draw
from megatron_neobert.inspection.run_log import RunLog, read_run


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
    assert (run.restarts, run.unreadable) == ([], 0)
    assert run.series("validation_loss") == ([20], [3.0])


def restarted(iteration):
    return json.dumps({"iteration": iteration, "restarted": 1}) + "\n"


def test_iterations_that_a_resumed_run_repeats_replace_the_earlier_ones(tmp_path):
    before = [interval(10, 5.0), interval(20, 4.0), validation(20), interval(30, 3.0), validation(30, 9.0)]
    run = read(tmp_path, *before, restarted(10), interval(20, 4.5), interval(30, 3.5))
    assert run.series("loss") == ([10, 20, 30], [5.0, 4.5, 3.5])
    assert run.series("validation_loss") == ([], [])  # of iterations that were repeated
    assert run.restarts == [10]
    again = read(tmp_path, *before, restarted(20), interval(30), restarted(20), interval(30), restarted(10))
    assert (again.restarts, list(again.values)) == ([10], [10])
    before_first_checkpoint = read(tmp_path, interval(10, 5.0), validation(10), restarted(0), interval(10, 4.5))
    assert before_first_checkpoint.series("loss") == ([10], [4.5])
    assert (before_first_checkpoint.restarts, before_first_checkpoint.series("validation_loss")) == ([0], ([], []))


def test_a_last_line_that_is_being_written_is_dropped_without_a_warning(tmp_path):
    run = read(tmp_path, interval(10), interval(20)[:-30])
    assert (list(run.values), run.unreadable) == ([10], 0)
    assert list(read(tmp_path, interval(10), interval(20)[:-1]).values) == [10, 20]  # whole, without its line feed


def test_a_line_that_was_appended_to_a_cut_line_is_read(tmp_path):
    run = read(tmp_path, interval(10), interval(20)[:-30] + interval(20, 7.0), interval(30))
    assert run.series("loss") == ([10, 20, 30], [2.0, 7.0, 2.0])


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
def test_a_line_that_no_run_writes_is_dropped_and_counted(tmp_path, line):
    run = read(tmp_path, interval(10), line + "\n", interval(30))
    assert (list(run.values), run.unreadable) == ([10, 30], 1)


def test_only_finite_numbers_are_values(tmp_path):
    values = f'"a": 1e999, "b": NaN, "c": "1", "d": true, "e": [1], "f": {"9" * 400}, "h": 1e300, "g": 2'
    assert read(tmp_path, interval(10), f'{{"iteration": 20, {values}}}\n').values[20] == {"g": 2}


@pytest.mark.parametrize("name", ["a\ud800b", "\x1b[31mred", '=HYPERLINK("http://x")', "a b", "x" * 65, "", "\u5b9f"])
def test_only_words_are_names_of_metrics(tmp_path, name):
    line = json.dumps({"iteration": 20, name: 1.0, "good_1": 2.0, "x" * 64: 3.0}) + "\n"
    assert read(tmp_path, interval(10), line).values[20] == {"good_1": 2.0, "x" * 64: 3.0}


def test_an_interval_without_a_loss_is_a_gap_in_the_curve(tmp_path):
    skipped = json.dumps({"iteration": 20, "lr": 1e-3, "consumed_tokens": 20000}) + "\n"
    iterations, losses = read(tmp_path, interval(10), skipped, interval(30)).series("loss")
    assert iterations == [10, 20, 30] and math.isnan(losses[1])


def test_tokens_between_two_intervals_are_interpolated(tmp_path):
    run = read(tmp_path, interval(10), validation(15), interval(20, consumed_tokens=30000))
    assert run.tokens_at([5, 10, 15, 20]) == [5000, 10000, (10000 + 30000) / 2, 30000]
    with pytest.raises(DataError, match="r: no interval has ended"):
        read(tmp_path, validation(15)).tokens_at([15])


def test_a_folder_without_a_log_and_a_log_without_a_line_are_refused(tmp_path):
    with pytest.raises(MissingInputError, match=r"holds no metrics\.jsonl; name the folder given to --save"):
        read_run(tmp_path, name="r")
    with pytest.raises(MissingInputError, match="nowhere does not exist"):
        read_run(tmp_path / "nowhere", name="r")
    with pytest.raises(DataError, match="has no whole line with an iteration and a value"):
        read(tmp_path, interval(10)[:-30])


# --- figures: logged values are drawn, and restarts are marked


TOKENS = 1_000_000  # per iteration


def run_of(name="a", losses=(9.0, 5.0, 4.0), *, restarts=(), **metrics):
    values = {
        10 * (number + 1): {"loss": loss, "consumed_tokens": 10 * (number + 1) * TOKENS, **metrics}
        for number, loss in enumerate(losses)
    }
    return RunLog(name=name, values=values, restarts=list(restarts), unreadable=0)


def lines_of(figure, *, axes=0):
    """Return (x, y, colour) of each line of a panel."""
    lines = figure.axes[axes].lines
    return [(list(line.get_xdata()), list(line.get_ydata()), to_hex(line.get_color()).upper()) for line in lines]


def test_a_loss_is_drawn_against_tokens_and_validation_in_the_same_panel():
    run = run_of()
    run.values[20]["validation_loss"] = 5.5
    figure = draw([run], ["loss"], x="tokens")
    assert lines_of(figure) == [
        ([10 * TOKENS, 20 * TOKENS, 30 * TOKENS], [9, 5, 4], COLOURS[0]),
        ([20 * TOKENS], [5.5], COLOURS[0]),
    ]
    assert figure.axes[0].get_xlabel() == "tokens of documents"
    assert lines_of(draw([run], ["loss"], x="iteration"))[0][0] == [10, 20, 30]


def test_a_restart_is_marked_in_every_panel_at_its_tokens_in_the_colour_of_its_run():
    runs = [run_of("a", lr=1.0), run_of("b", restarts=[0, 20], lr=1.0)]
    figure = draw(runs, ["loss", "lr"], x="tokens")
    for panel in (0, 1):
        ticks = [(x[0], colour) for x, _, colour in lines_of(figure, axes=panel) if len(set(x)) == 1 and len(x) == 2]
        assert ticks == [(0, COLOURS[1]), (20 * TOKENS, COLOURS[1])]
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["a", "b"]


def test_the_slowest_rank_is_drawn_by_default_where_a_run_has_several_ranks():
    assert choose_metrics(None, [run_of()]) == ["loss"]
    assert choose_metrics(None, [run_of(), run_of("b", slowest_rank=1, slowest_rank_lead=0.1)]) == [
        "loss",
        "slowest_rank_lead",
    ]
