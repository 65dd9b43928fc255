"""Randomly changed inputs are refused with one of our errors and its exit code, or read correctly.

No input may cause another exception, a hang, or the use of a gigabyte of memory.
"""

import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from fuzzing import NUMBERS, TEXTS, examples, mutated_file
from hypothesis import given
from hypothesis import strategies as st
from readers import KINDS, Kind, read_settings
from refusals import bounded

from megatron_neobert.cli import flag_of
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError, NeoBERTError

pytestmark = pytest.mark.slow

REQUIRED = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]
LONGEST = 5000  # characters of one problem; a ConfigError may have several


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def sound(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    kind.write(folder)
    return folder


@examples(300)
@given(data=st.data())
def test_changed_input_is_refused_in_one_sentence_or_read_correctly(kind, sound, data):
    copy = sound.with_name(f"{sound.name}_changed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sound, copy)
    changed = data.draw(st.sampled_from(sorted(path for path in copy.rglob("*") if path.is_file())))
    changed.write_bytes(data.draw(mutated_file(changed.name, changed.read_bytes())))
    try:
        with bounded():
            kind.read(copy)
    except NeoBERTError as error:
        assert_short(error)


def assert_short(error: NeoBERTError) -> None:
    problems = error.problems if isinstance(error, ConfigError) else str(error).split("\n  - ")
    assert all("\n" not in problem and len(problem) < LONGEST for problem in problems), problems
    assert error.exit_code in (2, 65, 66, 78)


NAMES = [item.name for section in fields(Settings) for item in fields(section.type)]
WORDS = st.one_of(
    st.sampled_from([flag_of(name) for name in NAMES]),
    st.sampled_from([f"--no-{name.replace('_', '-')}" for name in NAMES]),
    TEXTS,
    NUMBERS.filter(lambda number: number < 10**40).map(str),
    st.text(max_size=6),
    st.sampled_from(["--", "-", "--config", "--dry-run", "a:min=5", "0.5", "1e-3", "=", "--lr=", "--bf16=1", "99,1"]),
)


@examples(500)
@given(words=st.lists(WORDS, max_size=6), world_size=st.sampled_from([1, 6, 1000]))
def test_random_command_line_is_refused_or_gives_valid_settings(tmp_path_factory, words, world_size):
    if any(word in ("-h", "--help") for word in words):
        return
    try:
        with bounded():
            read_settings([*REQUIRED, *words], tmp_path_factory.getbasetemp(), world_size=world_size)
    except NeoBERTError as error:
        assert_short(error)
    except OSError:  # a file name that is too long
        assert "--config" in words
