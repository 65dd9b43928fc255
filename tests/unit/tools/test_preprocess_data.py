"""`neobert preprocess` and `neobert train-tokenizer`: output, exit codes and files."""

import json
import subprocess
import sys

import pytest
from commands import ENVIRONMENT, command_line, run_forked
from unit.data.command_place import LETTERS, arguments_of, make_place


@pytest.fixture
def place(tmp_path):
    """vocab.txt of the letters, and shards/a.jsonl of two documents."""
    place = make_place(tmp_path, [*LETTERS, "hello"])
    lines = ['{"content": "hello world", "text": "a b c"}', '{"content": "hello", "text": "d"}']
    (place / "shards" / "a.jsonl").write_text("\n".join(lines))
    return place


def test_run_reports_counts_and_files_and_validation_agrees(place):
    code, output = run_forked("preprocess", *arguments_of(place))
    assert code == 0
    assert output.startswith("2 documents | 7 tokens | 0.0 MB of text in ")  # hello w ##o ##r ##l ##d, hello
    rows = [line.split(maxsplit=1) for line in output.splitlines() if line.startswith("  ")]
    assert ["records", "2"] in rows and ["rejected", "none"] in rows and ["dropped", "none"] in rows
    assert ["tokens", "7, 0.000 % of them unknown"] in rows
    assert output.splitlines()[-1] == f"wrote {place / 'run_content_document.json'}, run_content_document.bin, .idx"
    code, output = run_forked("validate", place / "run_content_document", "--full")
    assert code == 0 and "2 documents, 7 tokens as uint16, 58 ids" in output


def test_relative_inputs_are_recorded_as_the_user_gave_them(place, monkeypatch):
    monkeypatch.chdir(place)
    relative = ("--input", "shards", "--output-prefix", "run", "--tokenizer-model", "vocab.txt")
    for more in ([], ["--resume"]):
        assert run_forked("preprocess", *relative, *more).code == 0
    assert list(json.loads((place / "run_content_document.json").read_text())["inputs"]) == ["shards/a.jsonl"]


def test_dry_run_prints_the_plan_and_writes_nothing(place):
    before = sorted(place.rglob("*"))
    code, output = run_forked("preprocess", *arguments_of(place, "--dry-run"))
    assert code == 0
    assert f"{place / 'shards' / 'a.jsonl'} | jsonl" in output
    assert "1 input file, " in output and "58 ids, uint16" in output
    assert "text  hello world\nids   57 27 45 48 42 34  (6 ids)" in output
    assert "estimated from a sample: 2 documents, 7 tokens" in output
    assert f"would write {place / 'run_content_document.bin'}" in output
    assert sorted(place.rglob("*")) == before


def test_many_unknown_tokens_give_a_warning(place):
    (place / "shards" / "a.jsonl").write_text(json.dumps({"content": "привет мир hello"}))
    code, output = run_forked("preprocess", *arguments_of(place))
    assert code == 0 and "warning: 66.7 % of the tokens are unknown" in output


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--text-key", "body"], 65, "2 of 2 records have no usable text (100.00 %), more than --max-error-rate 0.001"),
        (["--input", "nowhere*"], 66, "nowhere*: no file matches"),
        (["--tokenizer-model", "bert-base-uncased"], 66, "--tokenizer-model bert-base-uncased: no such file or folder"),
        (["--workers", "x"], 2, "--workers 'x' is not a whole number"),
        (["--shard-size", "inf"], 2, "--shard-size 'inf' is not a size"),
        (["--text-separator", "\\"], 2, "is no text with escapes"),
        (["--text-separator", "\\ud800"], 2, "is no text with escapes"),
        (["--max-error-rate", "nan"], 2, "nan is not a fraction"),
        (["--shard-size", "10XB"], 2, "--shard-size '10XB' is not a size; use a number of bytes"),
    ],
)
def test_invalid_argument_ends_with_its_exit_code_and_one_sentence(place, more, code, message):
    ended = run_forked("preprocess", *arguments_of(place, *more))
    assert ended.refused(code) and message in ended.output, ended.output
    assert not list(place.glob("run*"))


def test_existing_corpus_ends_the_run_with_73_unless_overwritten(place):
    assert run_forked("preprocess", *arguments_of(place)).code == 0
    for more in ([], ["--dry-run"]):
        ended = run_forked("preprocess", *arguments_of(place, *more))
        assert ended.refused(73) and "run_content_document.json exist already" in ended.output
    assert run_forked("preprocess", *arguments_of(place, "--overwrite")).code == 0


@pytest.mark.parametrize("tool", ["preprocess", "validate", "train-tokenizer"])
def test_run_imports_neither_torch_nor_transformers(place, tool):
    assert run_forked("preprocess", *arguments_of(place, "--output-prefix", place / "first")).code == 0
    arguments = {
        "preprocess": arguments_of(place),
        "validate": (place / "first_content_document", "--full"),
        "train-tokenizer": ("--input", place / "shards", "--output", place / "trained", "--vocab-size", "200"),
    }[tool]
    unwanted = {"torch", "transformers"} | ({"tokenizers"} if tool == "validate" else set())
    script = f"""
import runpy, sys
sys.argv[1:] = {[tool, *map(str, arguments)]}
try: runpy.run_module("megatron_neobert", run_name="__main__")
except SystemExit as end: assert not end.code, end.code
assert not {unwanted} & set(sys.modules), "imported"
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr


def test_closed_output_pipe_ends_with_141_and_a_complete_corpus(place):
    pipeline = '"$@" | true; exit "${PIPESTATUS[0]}"'
    command = ["bash", "-c", pipeline, "bash", *command_line("preprocess", *arguments_of(place))]
    environment = {**ENVIRONMENT, "TQDM_DISABLE": "1"}  # a user can switch progress bars off
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (ended.returncode, ended.stderr) == (141, "")
    assert (place / "run_content_document.json").exists()


def test_resuming_a_finished_corpus_does_nothing(place):
    assert run_forked("preprocess", *arguments_of(place, "--resume")).code == 0
    before = (place / "run_content_document.bin").stat().st_mtime_ns
    (place / "run_content_document.partial.removed-1").mkdir()  # of a run that was killed at its very end
    code, output = run_forked("preprocess", *arguments_of(place, "--resume"))
    assert (code, output) == (0, f"{place / 'run_content_document.json'} is complete; nothing to do\n")
    assert (place / "run_content_document.bin").stat().st_mtime_ns == before
    assert not list(place.glob("*.partial*"))


# --- tokenizers


def test_trained_tokenizer_is_the_same_every_time_and_has_no_unknown_tokens_in_its_input(place):
    for name in ("one", "two"):
        more = ("--output", place / name, "--vocab-size", "150", "--min-frequency", "1")
        code, output = run_forked("train-tokenizer", "--input", place / "shards", *more)
        assert code == 0 and output.startswith("2 documents | ")
    for file in ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (place / "one" / file).read_bytes() == (place / "two" / file).read_bytes()
    assert run_forked("preprocess", *arguments_of(place, "--tokenizer-model", place / "one")).code == 0
    assert json.loads((place / "run_content_document.json").read_text())["unknown_tokens"] == 0


def test_tokenizer_training_refuses_too_many_errors_like_preprocessing(place):
    more = ("--output", place / "trained", "--vocab-size", "200")
    (place / "shards" / "b.jsonl").write_text('{"text": "hello"}\n' * 2 + '{"content": ""}\n')
    ended = run_forked("train-tokenizer", "--input", place / "shards", *more)
    assert ended.refused(65)
    assert "2 of 5 records have no usable text (40.00 %), more than --max-error-rate 0.001" in ended.output
    assert "b.jsonl, line 1: missing key (no key 'content'; keys found: text)" in ended.output
    assert not (place / "trained").exists()
    ended = run_forked("train-tokenizer", "--input", place / "shards", *more, "--max-error-rate", "0.4")
    assert ended.code == 0 and "left out: 2 missing key, 1 empty text" in ended.output
