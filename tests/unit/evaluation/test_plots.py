"""Figures show names as they are."""

from megatron_neobert.evaluation.plots import Curve, plot_curves

X, Y = [512, 1024, 2048], [3, 2, 1]


def draw(path, *curves, **options):
    plot_curves(path, curves, **{"x_label": "tokens", "y_label": "tokens/s", "title": "t", **options})
    return path.read_bytes()


def test_names_with_an_underscore_or_dollars_are_shown_as_they_are(tmp_path):
    """matplotlib hides labels that begin with an underscore, and reads text between dollars as TeX."""
    shown = {draw(tmp_path / "a.png", Curve(name, X, Y)) for name in ("_a", "_b", r"$\frac$", r"$\no$")}
    assert len(shown) == 4
    draw(tmp_path / "a.png", Curve("a", X, Y), title=r"$\frac$", x_label=r"$\no$")
