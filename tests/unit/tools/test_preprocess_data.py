"""`neobert preprocess` and `neobert train-tokenizer` as a user calls them: output, files and exit codes."""

import json
import sys

import pytest
from commands import ENVIRONMENT, command_line, run_forked, run_program, succeed
from unit.data.preprocess_workspace import LETTERS, Workspace, arguments_of


@pytest.fixture
def place(tmp_path):
    """Return a folder with vocab.txt of the letters, and inputs/a.jsonl of two documents."""
    workspace = Workspace(tmp_path, [*LETTERS, "hello"])
    lines = ['{"content": "hello world", "text": "a b c"}', '{"content": "hello", "text": "d"}']
    workspace.add_lines("a.jsonl", *lines)
    return workspace.folder


def test_report_of_a_run_agrees_with_validation_and_only_the_full_check_finds_exchanged_tokens(place):
    code, output = run_forked("preprocess", *arguments_of(place))
    assert code == 0
    assert output.startswith("2 documents | 7 tokens | 0.0 MB of text in ")  # hello w ##o ##r ##l ##d, hello
    rows = [line.split()[0] for line in output.splitlines() if line.startswith("  ")]
    assert rows == ["tokens/document"], "no row that repeats the first line, and none of zeros"
    prefix = place / "run_content_document"
    assert output.splitlines()[-1] == f"wrote {prefix} (.bin, .idx, .json); train with --data-path {prefix}"
    code, output = run_forked("validate", place / "run_content_document", "--full")
    assert code == 0 and "2 documents, 7 tokens as uint16, 58 ids" in output
    ids = place / "run_content_document.bin"
    ids.write_bytes(ids.read_bytes()[::-2] + ids.read_bytes()[::2])
    assert run_forked("validate", place / "run_content_document").code == 0
    code, output = run_forked("validate", place / "run_content_document", "--full")
    assert code == 65 and "run_content_document.bin, byte 0: expected " in output


def test_relative_inputs_are_named_as_given(place, monkeypatch):
    monkeypatch.chdir(place)
    relative = ("--input", "inputs", "--output-prefix", "run", "--tokenizer-model", "vocab.txt")
    for more in ([], ["--resume"]):
        assert run_forked("preprocess", *relative, *more).code == 0
    assert list(json.loads((place / "run_content_document.json").read_text())["inputs"]) == ["inputs/a.jsonl"]


def test_dry_run_shows_inputs_a_sample_and_outputs_and_writes_nothing(place):
    before = sorted(place.rglob("*"))
    code, output = run_forked("preprocess", *arguments_of(place, "--dry-run"))
    assert code == 0
    assert f"{place / 'inputs' / 'a.jsonl'} | jsonl" in output
    assert "1 input file, " in output and "58 ids, uint16" in output
    assert "text  hello world\nids   57 27 45 48 42 34  (6 ids)" in output
    assert "estimated from a sample: 2 documents, 7 tokens" in output
    assert f"would write {place / 'run_content_document.bin'}" in output
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--tokenizer-backend", "reference")])
@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("привет мир hello", ("66.7 %", "56.2 %")),
        # One of 200 tokens replaces 101 of 499 characters, as in scripts without spaces.
        ("h " * 199 + "x" * 101, ("0.5 %", "20.2 %")),
        # Nothing is lost in a word of 100 characters.
        ("h " * 199 + "x" * 100, None),
    ],
)
def test_text_in_unknown_tokens_causes_a_warning(place, flags, text, shares):
    (place / "inputs" / "a.jsonl").write_text(json.dumps({"content": text}))
    code, output = run_forked("preprocess", *arguments_of(place, *flags))
    expected = shares and f"warning: {shares[0]} of the tokens are unknown, with {shares[1]} of the text of a sample"
    assert code == 0 and (expected in output if shares else "unknown, with" not in output), output


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--text-key", "body"], 65, "2 of 2 records have no usable text (100.00 %), more than --max-error-rate 0.001"),
        (["--tokenizer-model", "none/vocab.txt"], 66, "--tokenizer-model none/vocab.txt: no such file or folder"),
        (["--shard-size", "20kB", "--text-key", "body"], 65, "have no usable text"),
        (["--shard-size", "20Kb"], 2, "--shard-size '20Kb' is not a size"),
        (["--shard-size", "inf"], 2, "--shard-size 'inf' is not a size"),
        (["--text-separator", "\\"], 2, "has an invalid escape"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence_with_their_exit_code(place, more, code, message):
    ended = run_forked("preprocess", *arguments_of(place, *more))
    assert ended.refused(code) and message in ended.output, ended.output
    assert not list(place.glob("run*"))


@pytest.mark.parametrize("tool", ["preprocess", "validate", "train-tokenizer"])
def test_whole_run_imports_neither_torch_nor_transformers(place, tool):
    """tests/unit/tools/test_every_command.py has --help of every command."""
    assert run_forked("preprocess", *arguments_of(place, "--output-prefix", place / "first")).code == 0
    arguments = {
        "preprocess": arguments_of(place),
        "validate": (place / "first_content_document", "--full"),
        "train-tokenizer": ("--input", place / "inputs", "--output", place / "trained", "--vocab-size", "200"),
    }[tool]
    unwanted = {"torch", "transformers"} | ({"tokenizers"} if tool == "validate" else set())
    script = f"""
import runpy, sys
sys.argv[1:] = {[tool, *map(str, arguments)]}
try: runpy.run_module("megatron_neobert", run_name="__main__")
except SystemExit as end: assert not end.code, end.code
assert not {unwanted} & set(sys.modules), "imported"
"""
    succeed(sys.executable, "-c", script)


def test_closed_standard_output_ends_with_141_after_the_corpus_is_complete(place):
    pipeline = '"$@" | true; exit "${PIPESTATUS[0]}"'
    command = ["bash", "-c", pipeline, "bash", *command_line("preprocess", *arguments_of(place))]
    ended = run_program(*command, env=ENVIRONMENT | {"TQDM_DISABLE": "1"})  # users may disable the progress bar
    assert (ended.returncode, ended.stderr) == (141, "")
    assert (place / "run_content_document.json").exists()


@pytest.mark.parametrize(
    ("flags", "advice"), [((), ""), (("--shard-size", "1"), "; to change --shard-size, add --overwrite")]
)
def test_finished_corpus_is_refused_and_with_resume_left_as_it_is(place, flags, advice):
    assert run_forked("preprocess", *arguments_of(place, "--resume")).code == 0
    for more in ([], ["--dry-run"]):
        ended = run_forked("preprocess", *arguments_of(place, *more))
        assert ended.refused(73) and "run_content_document.json exist already" in ended.output
    before = (place / "run_content_document.bin").stat().st_mtime_ns
    (place / "run_content_document.partial.removed-1").mkdir()  # left by a run that was killed at the end
    code, output = run_forked("preprocess", *arguments_of(place, "--resume", *flags))
    assert (code, output) == (0, f"{place / 'run_content_document.json'} is complete; nothing to do{advice}\n")
    assert (place / "run_content_document.bin").stat().st_mtime_ns == before
    assert not list(place.glob("*.partial*"))


def test_trained_tokenizer_preprocesses_its_inputs_without_unknown_tokens(place):
    more = ("--output", place / "trained", "--vocab-size", "150", "--min-frequency", "1")
    code, output = run_forked("train-tokenizer", "--input", place / "inputs", *more)
    assert code == 0 and ", from 2 documents; " in output
    assert run_forked("preprocess", *arguments_of(place, "--tokenizer-model", place / "trained")).code == 0
    assert json.loads((place / "run_content_document.json").read_text())["unknown_tokens"] == 0


def test_tokenizer_is_not_trained_if_too_many_records_lack_the_text_key(place):
    """The rule and the message are those of preprocessing."""
    more = ("--output", place / "trained", "--vocab-size", "200")
    (place / "inputs" / "b.jsonl").write_text('{"text": "hello"}\n' * 2 + '{"content": ""}\n')
    ended = run_forked("train-tokenizer", "--input", place / "inputs", *more)
    assert ended.refused(65)
    assert "2 of 5 records have no usable text (40.00 %), more than --max-error-rate 0.001" in ended.output
    assert "b.jsonl, line 1: missing key (no key 'content'; keys found: text)" in ended.output
    assert not (place / "trained").exists()
    ended = run_forked("train-tokenizer", "--input", place / "inputs", *more, "--max-error-rate", "0.4")
    assert ended.code == 0 and "left out: 2 missing key, 1 empty text" in ended.output
