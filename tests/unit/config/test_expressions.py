"""Expressions over document attributes: the grammar is small, and input is parsed but never executed."""

import warnings

import pytest

from megatron_neobert.config.expressions import names_in, parse_expression
from megatron_neobert.errors import ConfigError


def test_names_in_an_expression_are_its_attributes():
    tree = parse_expression(" not (a>=-1.5 and b in ['x', \"y:z\"]) or 1<c<=d and e and f not in [1] ")
    assert names_in(tree) == set("abcdef")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names_in(parse_expression(r"a == '\d#'  # digits")) == {"a"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "invalid syntax"),
        ("a=='x", "unterminated string literal"),
        ("score>=3; import os", "invalid syntax"),
        ("score>=3\x00", "is not an expression"),
        ("__import__('os').system('true')", "is refused"),
        ("a.b == 3", "'a.b' is refused"),
        ("'a' in ['a']", "is refused"),
        (r"a == '\ud800x'", "is refused"),
        ("a + 1 > 2", "'a + 1' is refused"),
        ("a in b", "is refused"),
        ("a in ['x', [1]]", "'[1]' is refused"),
        ("a == 9223372036854775808", "'9223372036854775808' is refused"),
        ("(lambda: 0) == a", "is refused"),
        ("1 == 1", "'1 == 1' is refused"),
        ("not " * 60 + "a", "is refused"),
        ("not " * 1000 + "a", ""),
        ("(" * 1000 + "a" + ")" * 1000, "too many nested parentheses"),
        ("a == 1 or " * 1000 + "a == 1", "is longer than 4,096"),
    ],
)
def test_expression_outside_the_grammar_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_expression(text)
    assert message in caught.value.problems[0]
