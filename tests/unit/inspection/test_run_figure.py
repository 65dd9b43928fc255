"""Curves: what was logged is drawn, restarts are marked, and the table holds the numbers as they were."""

import csv
import io
import struct

import pytest
from matplotlib.colors import to_hex

from megatron_neobert.evaluation.plots import COLOURS
from megatron_neobert.inspection.run_figure import draw, to_csv, write_curves
from megatron_neobert.inspection.run_log import RunLog

TOKENS = 1_000_000  # per iteration


def run_of(name="a", losses=(9.0, 5.0, 4.0), *, restarts=(), **metrics):
    values = {
        10 * (number + 1): {"loss": loss, "consumed_tokens": 10 * (number + 1) * TOKENS, **metrics}
        for number, loss in enumerate(losses)
    }
    return RunLog(name=name, values=values, restarts=list(restarts), unreadable=0)


def lines_of(figure, *, axes=0):
    """(x, y, colour) of each line of a panel."""
    found = figure.axes[axes].lines
    return [(list(line.get_xdata()), list(line.get_ydata()), to_hex(line.get_color()).upper()) for line in found]


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
    runs = [run_of("a", lr=1.0), run_of("b", restarts=[10, 20], lr=1.0)]
    figure = draw(runs, ["loss", "lr"], x="tokens")
    for panel in (0, 1):
        ticks = [(x[0], colour) for x, _, colour in lines_of(figure, axes=panel) if len(set(x)) == 1 and len(x) == 2]
        assert ticks == [(10 * TOKENS, COLOURS[1]), (20 * TOKENS, COLOURS[1])]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["a", "b", "resumed after a stop"]


def test_the_table_holds_every_number_as_it_was_logged():
    runs = [run_of("a,\n", restarts=[10], lr=6e-4), run_of("b", losses=(1.25,), mfu=0.4)]
    rows = list(csv.DictReader(io.StringIO(to_csv(runs))))
    assert [(row["run"], row["iteration"], row["restarts"]) for row in rows] == [
        ("a,\n", "10", "0"), ("a,\n", "20", "1"), ("a,\n", "30", "1"), ("b", "10", "0")
    ]  # fmt: skip
    assert (rows[0]["lr"], rows[0]["consumed_tokens"], rows[0]["mfu"]) == ("0.0006", "10000000", "")
    assert (rows[3]["loss"], rows[3]["mfu"]) == ("1.25", "0.4")


@pytest.mark.parametrize("beginning", ["=", "+", "-", "@"])
def test_a_run_is_no_formula_to_a_spreadsheet(beginning):
    rows = list(csv.DictReader(io.StringIO(to_csv([run_of(f"{beginning}1"), run_of("a=1", losses=(1.0,))]))))
    assert [row["run"] for row in rows] == [f"./{beginning}1"] * 3 + ["a=1"]


def test_the_same_logs_give_the_same_files_and_names_are_not_markup(tmp_path):
    name = r"_$\frac$ <b>&--"
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        paths = write_curves(folder, [run_of(name)], ["loss"], x="tokens")
        assert sorted(folder.iterdir()) == sorted(paths)
        written.append([path.read_bytes() for path in paths])
    assert written[0] == written[1]
    png, _ = written[0]
    width, height = struct.unpack(">II", png[16:24])
    assert png[:4] == b"\x89PNG" and width == 1536 and height > 400
