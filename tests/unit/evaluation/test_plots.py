"""Figures: their size, that what is drawn is there, and that names are not read as markup."""

from megatron_neobert.evaluation.plots import Curve, plot_curves

X = [512, 1024, 2048]


def draw(path, *curves, **options):
    plot_curves(path, curves, **{"x_label": "tokens", "y_label": "tokens/s", "title": "t", **options})
    return path.read_bytes()


def test_a_band_is_drawn_where_it_is_given_even_with_values_missing(tmp_path):
    nan = float("nan")
    bare = draw(tmp_path / "a.png", Curve("a", X, [3, 2, 1]), log_y=True)
    assert draw(tmp_path / "a.png", Curve("a", X, [3, 2, 1], [2, 1, nan], [4, 3, nan]), log_y=True) != bare
    assert draw(tmp_path / "a.png", Curve("a", X, [3, 2, 1], [nan] * 3, [nan] * 3), log_y=True) == bare


def test_names_are_shown_as_they_are(tmp_path):
    """matplotlib hides labels that begin with an underscore, and reads what stands between dollars as TeX."""
    shown = {draw(tmp_path / "a.png", Curve(name, X, [3, 2, 1])) for name in ("_a", "_b", r"$\frac$", r"$\no$")}
    assert len(shown) == 4
    draw(tmp_path / "a.png", Curve("a", X, [3, 2, 1]), title=r"$\frac$", x_label=r"$\no$")
