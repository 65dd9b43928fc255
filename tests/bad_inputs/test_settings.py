"""Settings that the user cannot have meant are refused with the file, the setting and its value before a run starts.

tests/unit/config has the settings that contradict each other.
"""

import os
from functools import partial
from itertools import pairwise

import pytest
from bad_inputs.refusals import assert_refused, start_checks

from megatron_neobert.config.cli import parse_command_line, read_record
from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.errors import CheckpointError

REQUIRED = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]


def parse(*arguments, world_size=1):
    return parse_command_line([*REQUIRED, *arguments], world_size=world_size).settings


def aliases(last):
    """Return a page of YAML in which a list of ten aliases of a list of ten aliases ... has 10^9 entries."""
    names = "abcdefghi"
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]" for before, name in pairwise(names)]
    return "data:\n" + "".join(f"  {line}\n" for line in lines) + last


YAML = {
    "5,000 lists deep": ("model: " + "[" * 5000, "recursion"),
    "map in itself": ("model: &a {num_layers: *a}\n", "is not a whole number"),
    "impossible date": ("model:\n  num_layers: 2024-99-99\n", "month must be in 1..12"),
    "name of a function": ("model: !!python/name:os.system\n", "could not determine a constructor"),
    "class to call": ("training:\n  _target_: os.mkdir\n", "unknown setting training._target_"),
    "5,000 digits": ("model:\n  num_layers: " + "9" * 5000, "4300 digits"),
    "400 digits": ("model:\n  num_layers: " + "9" * 400, "1329 bits is beyond 9223372036854775807"),
    "other digits": ("training:\n  train_iters: ٣٠٠٠\n", "'٣٠٠٠' is not a whole number"),
    "quoted bool": ("training:\n  bf16: 'true'\n", "'true' is not true or false"),
    "empty path": ('checkpoint:\n  save: ""\n', "'' is not a text in UTF-8"),
    "NUL in a path": ('checkpoint:\n  save: "a\\0b"\n', "'a\\x00b' is not a text"),
    "half a character in a path": ('checkpoint:\n  save: "a\\uD800b"\n', "is not a text"),
    "list for a section": ("? [a]\n: 1\n", "not readable as YAML"),
    "section of 999 letters": ("x" * 999 + ": 1\n", "unknown section 'xx"),
    "section of two lines": ('"a\\nb": 1\n', "unknown section 'a\\nb'"),
    "two documents": ("model: {}\n---\nmodel: {}\n", "expected a single document"),
    "10 MB of comments": ("# x\n" * 2_500_000, "10,000,000 bytes are more than 262,144"),
    "UTF-16": ("model:\n  num_layers: 2\n".encode("utf-16"), "'utf-8' codec can't decode"),
    "10^9 aliases as a section": (aliases("model: *i\n"), "unknown setting"),
    "10^9 aliases as a value": (aliases("  data_path: *i\n"), "data_path"),
}


@pytest.mark.parametrize(("text", "words"), YAML.values(), ids=YAML)
def test_yaml_that_says_no_settings_is_refused_in_short_sentences(tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    flags = ["--tokenizer-model", "tokenizer"]  # and --data-path only where the file has none
    flags += [] if "data_path" in str(text) else REQUIRED[:2]
    assert_refused(lambda: parse_command_line([*flags, "--config", str(path)], world_size=1), 2, words)


@pytest.mark.parametrize("text", ["", "model:\n", "\ufeffmodel: {}\n", "---\n...\n", "null\n"])
def test_yaml_that_says_nothing_leaves_the_defaults(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    assert parse("--config", str(path)) == parse()


def test_a_record_that_is_no_yaml_is_a_checkpoint_error(tmp_path):
    path = tmp_path / "settings.yaml"
    for content in (b"\0", b"[" * 5000, b"model:\n  swiglu: !!bool x\n", b"# x\n" * 99_999):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"settings\.yaml: not the settings of a run"):
            read_record(path)


FLAGS = [
    (["--bf16=false"], "ignored explicit argument 'false'"),
    (["--train-iters", "²"], "'²' is not a whole number"),
    (["--train-iters", "1e19"], "is beyond 9223372036854775807"),
    (["--hidden-size", "1000000000001"], "--hidden-size 1000000000001 is not a multiple"),
    (["--num-layers", "1000000000001", "--pipeline-model-parallel-size", "7"], "--num-layers 1000000000001"),
    (["--save", os.fsdecode(b"caf\xe9")], "--save 'caf\\udce9' is not a text in UTF-8"),
    (["--unknown-" + "x" * 9999], "unknown flag --unknown-xxx"),
    (["--"], "unknown flag --"),
]


@pytest.mark.parametrize(("arguments", "words"), FLAGS, ids=[" ".join(words)[:40] for words, _ in FLAGS])
def test_flag_that_nobody_meant_is_refused(arguments, words):
    assert_refused(lambda: parse(*arguments, world_size=7 if "7" in arguments else 1), 2, words)


BLENDS = [
    (["a:min=" + "9" * 5000], "is not a limit"),
    (["a:min=٣"], "':min=٣' is not a limit"),
    (["1", "a", "1", "a"], "names a 2 times; name it once"),
    ([*["1", "a"] * 1025], "names 1,025 corpora, more than 1,024"),
    (["1/3", "a", "1", "b"], "'1/3', where the weight of a should stand, is no number"),
    (["0." + "1" * 5000, "a", "1", "b"], "is no number"),
]


@pytest.mark.parametrize(("entries", "words"), BLENDS, ids=[" ".join(entries)[:30] for entries, _ in BLENDS])
def test_blend_that_means_nothing_is_refused(entries, words):
    assert_refused(lambda: parse_data_path(entries), 2, words)


@pytest.mark.parametrize(
    ("split", "code", "words"),
    [
        *((split, 2, f"--split {split} is not one to three") for split in ("nan", "inf", "-1,2", "0,0", "1,1,1,1")),
        ("1,1e9", 2, "leaves part 1"),
        ("0,1", 65, "leaves none of the 4 documents"),
    ],
)
def test_split_that_leaves_nothing_to_train_on_is_refused(sound_corpus, split, code, words):
    assert_refused(lambda: start_checks(*sound_corpus.flags, f"--split={split}"), code, words)


def test_config_that_is_a_folder_or_does_not_exist_is_a_missing_input(tmp_path):
    assert_refused(lambda: parse("--config", str(tmp_path)), 66, str(tmp_path), "is a folder")
    assert_refused(lambda: parse("--config", ""), 66, "is a folder")
    assert_refused(lambda: parse("--config", str(tmp_path / "none.yaml")), 66, "no such file")


@pytest.mark.parametrize(
    ("where", "exit_code", "words"),
    [
        ("file/run", 73, "file/run cannot be created"),
        ("file", 73, "cannot be created"),
        ("x" * 300, 74, "File name too long"),
    ],
)
def test_folder_that_cannot_be_created_is_refused_at_the_start(sound_corpus, tmp_path, where, exit_code, words):
    (tmp_path / "file").write_text("")
    assert_refused(lambda: start_checks(*sound_corpus.flags, "--save", str(tmp_path / where)), exit_code, words)


def test_folder_to_load_that_is_a_file_or_empty_is_a_missing_input(sound_corpus, tmp_path):
    (tmp_path / "file").write_text("")
    for where in ("file", "nowhere", "."):
        flags = [*sound_corpus.flags, "--load", str(tmp_path / where)]
        assert_refused(partial(start_checks, *flags), 66, "--load")
