"""Numbers as a line of a log has them, and text that cannot act on a terminal."""

import pytest

from megatron_neobert.text import duration, visible, with_prefix


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (12.4, "12 tokens/s"),
        (999.6, "1.00 k tokens/s"),
        (9_996, "10.0 k tokens/s"),
        (99_960, "100 k tokens/s"),
        (151_203, "151 k tokens/s"),
        (1_214_000, "1.21 M tokens/s"),
    ],
)
def test_rates_have_three_digits(rate, text):
    assert with_prefix(rate, " tokens/s") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (3_700, "1 h 1 min"),
        (86_400 * 9 + 7_200 + 60, "9 d 2 h"),
        (86_400 * 1003, "1,003 d"),
    ],
)
def test_durations_have_the_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_what_a_terminal_would_act_upon_or_nobody_sees_is_escaped_but_joiners_stay():
    assert visible("a\nb\x1b\u202e\u2028é") == r"a\nb\x1b\u202e\u2028é"
    assert visible("a\nb\t", keep="\n") == "a\nb\\t"
    assert visible("a\u200bb\ufeff\U000e0041\u00ad") == r"a\u200bb\ufeff\U000e0041\xad"
    assert visible("\u0915\u094d\u200d \u200c") == "\u0915\u094d\u200d \u200c"
