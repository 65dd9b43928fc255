"""Figures show the bands that they are given, and names as they are."""

from megatron_neobert.evaluation.plots import Curve, plot_curves

X, Y = [512, 1024, 2048], [3, 2, 1]
NAN = float("nan")


def draw(path, *curves, **options):
    plot_curves(path, curves, **{"x_label": "tokens", "y_label": "tokens/s", "title": "t", **options})
    return path.read_bytes()


def test_band_is_drawn_except_where_its_values_are_missing(tmp_path):
    without = draw(tmp_path / "a.png", Curve("a", X, Y), log_y=True)
    assert draw(tmp_path / "a.png", Curve("a", X, Y, [2, 1, NAN], [4, 3, NAN]), log_y=True) != without
    assert draw(tmp_path / "a.png", Curve("a", X, Y, [NAN] * 3, [NAN] * 3), log_y=True) == without


def test_names_with_an_underscore_or_dollars_are_shown_as_they_are(tmp_path):
    """matplotlib hides labels that begin with an underscore, and reads text between dollars as TeX."""
    shown = {draw(tmp_path / "a.png", Curve(name, X, Y)) for name in ("_a", "_b", r"$\frac$", r"$\no$")}
    assert len(shown) == 4
    draw(tmp_path / "a.png", Curve("a", X, Y), title=r"$\frac$", x_label=r"$\no$")
