"""Settings that nobody meant: refused with the file, the setting and its value, before anything is started.

What tests/unit/config/test_cli.py, test_schema.py and test_data_path.py refuse already is not repeated here.
"""

import os
from functools import partial
from itertools import pairwise

import pytest
from bad_inputs.refusals import assert_all_refused, assert_refused, start_checks

from megatron_neobert.config.cli import parse_command_line, read_record
from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.errors import CheckpointError

REQUIRED = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]


def parse(*arguments, world_size=1):
    return parse_command_line([*REQUIRED, *arguments], world_size=world_size).settings


def aliases(levels, last):
    """A list of ten aliases of a list of ten aliases of ...: a page of YAML, 10^levels entries."""
    names = [chr(ord("a") + number) for number in range(levels)]
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]" for before, name in pairwise(names)]
    return "data:\n" + "".join(f"  {line}\n" for line in lines) + last.format(name=names[-1])


YAML = [
    pytest.param("model: " + "[" * 5000, ["not readable as YAML", "recursion"], id="5,000 lists deep"),
    pytest.param("model: &a {num_layers: *a}\n", ["model.num_layers {", "is not a whole number"], id="map in itself"),
    pytest.param("model:\n  num_layers: 2024-99-99\n", ["month must be in 1..12"], id="impossible date"),
    pytest.param("model:\n  num_layers: !!int x\n", ["invalid literal"], id="tag that lies about an int"),
    pytest.param("model: !!python/name:os.system\n", ["could not determine a constructor"], id="name of a function"),
    pytest.param("training:\n  _target_: os.mkdir\n", ["unknown setting training._target_"], id="class to call"),
    pytest.param("_target_: os.mkdir\n", ["unknown section _target_"], id="class to call, as a section"),
    pytest.param("model: &m {num_layers: 2}\ntraining: {<<: *m}\n", ["not readable", "merge"], id="merge key"),
    pytest.param("model:\n  num_layers: " + "9" * 5000, ["4300 digits"], id="5,000 digits"),
    pytest.param("model:\n  num_layers: " + "9" * 400, ["1329 bits is beyond 9223372036854775807"], id="400 digits"),
    pytest.param("training:\n  train_iters: 5,000,000\n", ["'5,000,000' is not a whole number"], id="commas"),
    pytest.param("training:\n  train_iters: ٣٠٠٠\n", ["'٣٠٠٠' is not a whole number"], id="other digits"),
    pytest.param("training:\n  bf16: 'true'\n", ["'true' is not true or false"], id="quoted bool"),
    pytest.param('checkpoint:\n  save: ""\n', ["'' is not a text in UTF-8"], id="empty path"),
    pytest.param('checkpoint:\n  save: "a\\0b"\n', ["'a\\x00b' is not a text"], id="NUL in a path"),
    pytest.param('checkpoint:\n  save: "a\\uD800b"\n', ["is not a text"], id="half a character in a path"),
    pytest.param("? [a]\n: 1\n", ["not readable as YAML"], id="list for a section"),
    pytest.param("x" * 999 + ": 1\n", ["unknown section 'xx"], id="section of 999 letters"),
    pytest.param('"a\\nb": 1\n', ["unknown section 'a\\nb'"], id="section of two lines"),
    pytest.param("model: {}\n---\nmodel: {}\n", ["expected a single document"], id="two documents"),
    pytest.param("# x\n" * 2_500_000, ["10,000,000 bytes are more than 262,144"], id="10 MB of comments"),
    pytest.param("model:\n  num_layers: 2\n".encode("utf-16"), ["'utf-8' codec can't decode"], id="UTF-16"),
    pytest.param(aliases(9, "model: *{name}\n"), [], id="10^9 aliases as a section"),
    pytest.param(aliases(9, "  data_path: *{name}\n"), [], id="10^9 aliases as a value"),
    pytest.param(aliases(9, "  ? *{name}\n  : 1\n"), ["not readable"], id="10^9 aliases as a key"),
]


@pytest.mark.parametrize(("text", "words"), YAML)
def test_yaml_that_says_no_settings_is_refused_in_short_sentences(tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    flags = ["--tokenizer-model", "tokenizer"]  # and --data-path only where the file has none
    flags += [] if "data_path" in str(text) else REQUIRED[:2]
    assert_all_refused(lambda: parse_command_line([*flags, "--config", str(path)], world_size=1), 2, *words)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "model:\n", "model: {}\n", "\ufeffmodel: {}\n", "---\n...\n", "null\n"]
)
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
    (["--bf16=false"], ["ignored explicit argument 'false'"]),
    (["--save="], ["--save '' is not a text"]),
    (["--train-iters", "²"], ["'²' is not a whole number"]),
    (["--train-iters", "1e19"], ["is beyond 9223372036854775807"]),
    (["--seed", str(2**63)], ["is beyond 9223372036854775807"]),
    (["--hidden-size", "1000000000001"], ["--hidden-size 1000000000001 is not a multiple"]),
    (["--num-layers", "1000000000001", "--pipeline-model-parallel-size", "7"], ["--num-layers 1000000000001"]),
    (["--save", os.fsdecode(b"caf\xe9")], ["--save 'caf\\udce9' is not a text in UTF-8"]),
    (["--save", "a\nb"], ["--save 'a\\nb' is not a text in UTF-8"]),
    (["--unknown-" + "x" * 9999], ["unknown flag --unknown-xxx"]),
    (["--"], ["unknown flag --"]),
]


@pytest.mark.parametrize(("arguments", "words"), FLAGS, ids=[" ".join(words)[:40] for words, _ in FLAGS])
def test_flag_that_nobody_meant_is_refused(arguments, words):
    world_size = 7 if "7" in arguments else 1
    assert_all_refused(lambda: parse(*arguments, world_size=world_size), 2, *words)


BLENDS = [
    (["a:min=" + "9" * 5000], ["is not a limit"]),
    (["a:max=" + "9" * 19], ["is not a limit"]),
    (["a:min=٣"], ["':min=٣' is not a limit"]),
    (["1", "a", "1", "a"], ["names a 2 times; name it once"]),
    ([*["1", "a"] * 1025], ["names 1,025 corpora, more than 1,024"]),
    (["1/3", "a", "1", "b"], ["'1/3', where the weight of a should stand, is no number"]),
    (["0." + "1" * 5000, "a", "1", "b"], ["'0.111", "is no number"]),
]


@pytest.mark.parametrize(("entries", "words"), BLENDS, ids=[" ".join(entries)[:30] for entries, _ in BLENDS])
def test_blend_that_means_nothing_is_refused(entries, words):
    assert_all_refused(lambda: parse_data_path(entries), 2, *words)


@pytest.mark.parametrize(
    ("split", "code", "words"),
    [
        ("", 2, "--split '' is not a text"),
        ("nan", 2, "--split nan is not one to three"),
        ("nan,1", 2, "--split nan,1 is not one to three"),
        ("inf", 2, "--split inf is not one to three"),
        ("1e308,1e308", 2, "--split 1e308,1e308 is not one to three"),
        ("-1,2", 2, "--split -1,2 is not one to three"),
        ("0,0", 2, "--split 0,0 is not one to three"),
        ("1,1,1,1", 2, "--split 1,1,1,1 is not one to three"),
        ("99:1", 2, "--split 99:1 is not one to three"),
        ("1,1e9", 2, "leaves part 1"),
        ("0,1", 65, "leaves none of the 4 documents"),
    ],
)
def test_split_that_leaves_nothing_to_train_on_is_refused(sound_corpus, split, code, words):
    assert_refused(lambda: start_checks(*sound_corpus.flags, f"--split={split}"), code, words)


def test_config_that_is_a_folder_or_nowhere_is_a_missing_input(tmp_path):
    assert_refused(lambda: parse("--config", str(tmp_path)), 66, str(tmp_path), "is a folder")
    assert_refused(lambda: parse("--config", str(tmp_path / "none.yaml")), 66, "no such file")
    assert_refused(lambda: parse("--config", ""), 66, "is a folder")


@pytest.mark.parametrize(
    ("where", "exit_code", "words"),
    [
        ("file/run", 73, ["--save", "file/run cannot be created"]),
        ("file", 73, ["--save", "cannot be created"]),
        ("/proc/nowhere/run", 73, ["--save /proc/nowhere/run cannot be created"]),
        ("x" * 300, 74, ["File name too long"]),
    ],
)
def test_folder_that_cannot_be_created_is_refused_at_the_start(sound_corpus, tmp_path, where, exit_code, words):
    (tmp_path / "file").write_text("")
    assert_refused(lambda: start_checks(*sound_corpus.flags, "--save", str(tmp_path / where)), exit_code, *words)


def test_folder_to_load_that_is_a_file_or_empty_is_a_missing_input(sound_corpus, tmp_path):
    (tmp_path / "file").write_text("")
    for where in ("file", "nowhere", "."):
        flags = [*sound_corpus.flags, "--load", str(tmp_path / where)]
        assert_refused(partial(start_checks, *flags), 66, "--load")
