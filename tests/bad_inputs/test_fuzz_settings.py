"""Mutated settings: refused with short sentences, or settings of the declared types that survive being saved."""

import json
import math
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml
from bad_inputs.fuzzing import NUMBERS, TEXTS, VALUES, examples, mutated, mutated_json
from bad_inputs.refusals import bounded
from hypothesis import given
from hypothesis import strategies as st

from megatron_neobert.cli import flag_of
from megatron_neobert.config.cli import parse_command_line, read_record, write_record
from megatron_neobert.config.data_path import parse_data_path, whole_weights
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.order import split_ranges
from megatron_neobert.errors import ConfigError, MissingInputError

pytestmark = pytest.mark.slow

REQUIRED = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]
TINY = (Path(__file__).resolve().parents[2] / "examples" / "configs" / "tiny.yaml").read_bytes()
RECORD = asdict(Settings())
NAMES = [item.name for section in fields(Settings) for item in fields(section.type)]
RANKS = st.sampled_from([1, 2, 6, 8, 1000])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("settings")


def check(arguments, world_size, place):
    try:
        with bounded():
            settings = parse_command_line(arguments, world_size=world_size).settings
    except ConfigError as error:
        assert all("\n" not in problem and len(problem) < 5000 for problem in error.problems), error.problems
    else:
        values = [value for section in asdict(settings).values() for value in section.values()]
        assert all(math.isfinite(value) for value in values if isinstance(value, float))
        assert all(abs(value) < 2**63 for value in values if isinstance(value, int))
        write_record(settings, place / "record.yaml")
        assert read_record(place / "record.yaml") == settings


@examples(300)
@given(content=mutated(TINY), world_size=RANKS)
def test_mutated_yaml_is_refused_or_means_settings(place, content, world_size):
    (place / "run.yaml").write_bytes(content)
    check([*REQUIRED, "--config", str(place / "run.yaml")], world_size, place)


@examples(120)
@given(content=mutated_json(RECORD), world_size=RANKS)
def test_mutated_record_is_refused_or_means_settings(place, content, world_size):
    """JSON is YAML; every setting is there, some of them spoilt."""
    (place / "run.yaml").write_bytes(content)
    check([*REQUIRED, "--config", str(place / "run.yaml")], world_size, place)


@st.composite
def sections(draw):
    chosen = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
    homes = {item.name: section.name for section in fields(Settings) for item in fields(section.type)}
    content = {}
    for name in chosen:
        content.setdefault(homes[name], {})[name] = draw(VALUES)
    return content


@examples(300)
@given(content=sections(), world_size=RANKS)
def test_settings_of_odd_values_are_refused_or_mean_settings(place, content, world_size):
    text = yaml.safe_dump(content) if "\ud800" not in str(content) else json.dumps(content)
    (place / "run.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    check([*REQUIRED, "--config", str(place / "run.yaml")], world_size, place)


WORDS = st.one_of(
    st.sampled_from([flag_of(name) for name in NAMES]),
    st.sampled_from([f"--no-{name.replace('_', '-')}" for name in NAMES]),
    TEXTS,
    NUMBERS.filter(lambda number: number < 10**40).map(str),
    st.text(max_size=6),
    st.sampled_from(["--", "-", "--config", "--dry-run", "a:min=5", "0.5", "1e-3", "=", "--lr=", "--bf16=1", "99,1"]),
)


@examples(500)
@given(words=st.lists(WORDS, max_size=6), world_size=RANKS)
def test_odd_words_on_the_command_line_are_refused_or_mean_settings(place, words, world_size):
    if any(word in ("-h", "--help") for word in words):
        return
    try:
        check([*REQUIRED, *words], world_size, place)
    except (MissingInputError, OSError):  # no such file, or a name longer than any; a dry run looks for the inputs
        assert {"--config", "--dry-run"} & {*words}


@examples(400)
@given(
    entries=st.lists(
        st.one_of(
            TEXTS,
            st.text(max_size=9),
            NUMBERS.filter(lambda n: n < 10**40).map(str),
            st.sampled_from(["a", "b:min=2", "b:max=1", "1", "0.1", "1e-9"]),
        ),
        max_size=6,
    )
)
def test_odd_blends_are_refused_or_have_whole_weights(entries):
    try:
        with bounded():
            components = parse_data_path(entries)
    except ConfigError as error:
        assert all(len(problem) < 1200 for problem in error.problems)
    else:
        assert all(weight >= 1 for weight in whole_weights(components))
        assert len({str(component) for component in components}) == len(components)


@examples(300)
@given(split=st.one_of(TEXTS, st.text("0123456789,.-e+naif", max_size=12)), documents=st.integers(1, 10**12))
def test_odd_splits_are_refused_or_cut_all_documents(split, documents):
    try:
        ranges = split_ranges(documents, split)
    except ConfigError:
        return
    assert sum(len(part) for part in ranges) == documents
