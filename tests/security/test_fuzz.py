"""Randomly changed inputs are refused with one of our errors and its exit code, or read correctly.

No input may cause another exception, a hang, or the use of a gigabyte of memory. The environment variable FUZZ_EXAMPLES
multiplies the number of examples and makes every run different; without it, a run is short and always the same.
"""

import copy
import json
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from readers import KINDS, Kind, read_settings
from refusals import bounded

from megatron_neobert.cli import flag_of
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError, NeoBERTError

pytestmark = pytest.mark.slow

REQUIRED = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]
LONGEST = 5000  # characters of one problem; a ConfigError may have several
set_hypothesis_home_dir(tempfile.gettempdir() + "/megatron_neobert_fuzz")  # not the working tree

TIMES = int(os.environ.get("FUZZ_EXAMPLES", "0"))

POWERS = [2**bits for bits in (0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 40, 63, 64)]
NUMBERS = st.sampled_from([0, *POWERS, *(power - 1 for power in POWERS), *(-power for power in POWERS), 10**400])
# fmt: off
TEXTS = st.sampled_from([
    "", " ", "0", "nan", "inf", "1e400", "5,000", "true", "null", "none", "../..", "/etc/passwd", "a\0b", "\ud800", "~",
    "x" * 300, "[MASK]", "[PAD]", "\u0663", "\n", "\u202e", "%s", "{}", "*", "&a", "!!int x", "2024-99-99", "9" * 5000,
])
# fmt: on
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.sampled_from([0.5, -0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")]),
    TEXTS,
    st.text(max_size=8),
    # Later mutations change these in place.
    st.sampled_from([[], {}, [[]], [{}], {"a": 1}, [1, "a"], [None] * 50]).map(copy.deepcopy),
)


def examples(count: int) -> settings:
    """Return hypothesis settings for `count` examples, more with FUZZ_EXAMPLES, without a time limit."""
    return settings(
        max_examples=count * max(1, TIMES),
        derandomize=not TIMES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the content after one to three changes: a part is removed, repeated, or replaced by other bytes."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(changed)))
        part = changed[start : start + draw(st.sampled_from([0, 1, 2, 4, 8, 40, len(changed)]))]
        number = draw(NUMBERS)
        binary = (number % 256 ** len(part)).to_bytes(len(part), "little")
        replacements = st.sampled_from([b"", part * 2, part * 50, str(number).encode(), binary])
        changed[start : start + len(part)] = draw(replacements | st.binary(max_size=200))
    return bytes(changed)


@st.composite
def mutated_file(draw: st.DrawFn, content: bytes) -> bytes:
    """Return a mutated file; half of the time, JSON is changed by entries and safetensors only in the header."""
    if content.startswith(b"{") and draw(st.booleans()):
        return draw(mutated_json(json.loads(content)))
    if content[8:9] == b"{" and draw(st.booleans()):
        end = 8 + int.from_bytes(content[:8], "little")
        return draw(mutated(content[:end])) + content[end:]
    return draw(mutated(content))


@st.composite
def mutated_json(draw: st.DrawFn, state: Any) -> bytes:
    """Return the JSON text of a state after one to three changes: an entry is replaced, removed or swapped."""
    for _ in range(draw(st.integers(1, 3))):
        holders = [holder for holder in holders_in(state) if holder]
        if not holders:
            break
        holder = draw(st.sampled_from(holders))
        keys = st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder)))
        key, other, kind = draw(keys), draw(keys), draw(st.sampled_from(["value", "value", "remove", "swap"]))
        if kind == "value":
            holder[key] = draw(VALUES)
        elif kind == "remove":
            del holder[key]
        else:
            holder[key], holder[other] = holder[other], holder[key]
    return json.dumps(state).replace("Infinity", "1e999").encode()


def holders_in(state: Any) -> list[Any]:
    """Return every dict and list in a state, the state first."""
    if not isinstance(state, (dict, list)):
        return []
    entries = state.values() if isinstance(state, dict) else state
    return [state, *(holder for entry in entries for holder in holders_in(entry))]


@pytest.fixture(scope="module", params=KINDS)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    """Return a kind of input and the folder of a valid one."""
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("sound")
    kind.write(folder)
    return kind, folder


@examples(300)
@given(data=st.data())
def test_changed_input_is_refused_in_one_sentence_or_read_correctly(sound, data):
    kind, folder = sound
    copy = folder.with_name(f"{folder.name}_changed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    changed = data.draw(st.sampled_from(sorted(path for path in copy.rglob("*") if path.is_file())))
    changed.write_bytes(data.draw(mutated_file(changed.read_bytes())))
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
