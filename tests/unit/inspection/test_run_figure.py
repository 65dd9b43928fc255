"""Curves: logged values are drawn, and restarts are marked."""

from matplotlib.colors import to_hex

from megatron_neobert.evaluation.plots import COLOURS
from megatron_neobert.inspection.plot import choose_metrics
from megatron_neobert.inspection.run_figure import draw
from megatron_neobert.inspection.run_log import RunLog

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
