"""Parsing of --data-path: corpora, weights, limits, and expressions, which are parsed but never executed."""

import re
import warnings
from fractions import Fraction

import pytest

from megatron_neobert.config.data_path import Component, names_in, parse_data_path, parse_expression, whole_weights
from megatron_neobert.errors import ConfigError


def test_single_entry_is_one_corpus_even_if_it_looks_like_a_weight_or_limit():
    assert parse_data_path(["run"]) == (Component("run"),)
    assert parse_data_path(["0.5"]) == (Component("0.5"),)
    assert parse_data_path(["/data/a:b/c d=e"]) == (Component("/data/a:b/c d=e"),)


def test_weights_are_exact_fractions_and_limits_are_numbers_of_tokens():
    assert parse_data_path(["0.2", "all", "4e-1", "all:min=1024", "0.4", "x/y:max=4096:min=2048"]) == (
        Component("all", Fraction(1, 5)),
        Component("all", Fraction(2, 5), minimum=1024),
        Component("x/y", Fraction(2, 5), minimum=2048, maximum=4096),
    )


@pytest.mark.parametrize(
    "entry", ["x/y:drop=/lists/a b=c.drop", "x/y:min=5:drop=../d", "x/y:drop=d:max=9:drop=b:min=5"]
)
def test_drop_list_is_a_path_and_can_be_combined_with_limits(entry):
    (component,) = parse_data_path([entry])
    assert component.prefix == "x/y"
    assert component.drop == tuple(re.findall("drop=([^:]*)", entry))
    assert (component.minimum, component.maximum) == (5 if "min" in entry else 1, 9 if "max" in entry else None)


@pytest.mark.parametrize(
    "expression", ["score>=3 and language=='en'", "input=='s3://b/*'", """x in ['a:min=3', "it's"]"""]
)
@pytest.mark.parametrize("form", ["C:where={}", "C:where={}:min=5:drop=l/x", "C:min=5:drop=l/x:where={}"])
def test_expression_can_have_colons_and_slashes_in_quoted_texts(expression, form):
    (component,) = parse_data_path([form.format(expression)])
    minimum, drop = (1, ()) if form == "C:where={}" else (5, ("l/x",))
    assert component == Component("C", minimum=minimum, where=expression, drop=drop)
    assert component.conditions == [*([] if minimum == 1 else ["length>=5"]), expression]
    assert parse_data_path([str(component)]) == (component,)


def test_whole_weights_are_the_smallest_numbers_with_the_same_proportions():
    assert whole_weights(parse_data_path(["0.2", "a", "0.4", "b", "0.4", "c"])) == (1, 2, 2)
    assert whole_weights(parse_data_path(["30", "a", "70", "b"])) == (3, 7)
    assert whole_weights(parse_data_path(["0.3", "a"])) == (1,)
    assert whole_weights(parse_data_path(["0.333", "a", "0.667", "b"])) == (333, 667)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "--data-path is missing"),
        (["a", "b"], "'a', the weight of b, is not a finite number above 0; name one corpus"),
        (["my", "corpus/web"], ":max=4096; quote a path that has a space."),
        (["0.5", "a", "0.5"], "3 entries, 0.5 a 0.5; several corpora need a weight each"),
        *(
            ([weight, "a", "1", "b"], f"'{weight}', the weight of a, is not a finite number above 0")
            for weight in ("0", "-0.5", "nan", "1e999999999", "1e-999999999")
        ),
        (["a:min=9:max=8"], "a:min=9:max=8: min=9 and max=8 select no document"),
        (["a:drop="], "':drop=' is not a limit"),
        (["a:drop=x:y"], "a:drop=x:y: the path after :drop= must not contain ':'"),
        (["a:where="], "a:where=: '' is not an expression (invalid syntax"),
        (["a:where=f(x)"], "'f(x)' is refused; expressions have attribute names"),
        ([":min=5"], "':min=5' names no corpus"),
    ],
)
def test_invalid_entry_is_refused_and_quoted(entries, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_data_path(entries)


def test_all_problems_of_all_entries_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        parse_data_path(["x", "a:min=5:max=4", "0", "b:top=3"])
    assert len(caught.value.problems) == 4


# --- expressions


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
