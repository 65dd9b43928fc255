"""Numbers as text, and text that is safe to print on a terminal."""

import pytest

from megatron_neobert.text import approximate, duration, visible, with_prefix


@pytest.mark.parametrize(
    ("rate", "text"), [(12.4, "12"), (999.6, "1.00 k"), (9_996, "10.0 k"), (99_960, "100 k"), (1_214_000, "1.21 M")]
)
def test_rates_have_three_digits(rate, text):
    assert with_prefix(rate, " tokens/s") == f"{text} tokens/s"


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.684, "1.68"), (26.96, "27.0"), (3_792, "3,790"), (37_925_925.93, "37.9 million"), (2.091e12, "2.09 trillion")],
)
def test_approximate_numbers_have_three_digits(number, text):
    assert approximate(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (3_700, "1 h 1 min"), (784_860, "9 d 2 h"), (905_300, "10.5 d")],
)
def test_durations_have_the_two_largest_units_or_days_with_a_decimal(seconds, text):
    assert duration(seconds) == text


def test_control_and_invisible_characters_are_escaped_and_joiners_are_not():
    assert visible("a\nb\x1b\u202e\u2028é") == r"a\nb\x1b\u202e\u2028é"
    assert visible("a\nb\t", keep="\n") == "a\nb\\t"
    assert visible("a\u200bb\ufeff\U000e0041\u00ad") == r"a\u200bb\ufeff\U000e0041\xad"
    assert visible("\u0915\u094d\u200d \u200c") == "\u0915\u094d\u200d \u200c"
