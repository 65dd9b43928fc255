"""Shell scripts parse and have a help text; the examples start, with --dry-run or a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, run_program
from distributed.ranks import environment
from json_files import write_jsonl
from security.good_inputs import write_eurobert
from tests_tiny import made_up_texts

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

EXAMPLES = REPOSITORY / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *REPOSITORY.glob("tools/*.sh"), REPOSITORY / ".ci" / "run"])
WITH_HELP = ["examples/quickstart.sh", "examples/speedrun.sh", "tools/prepare_environment.sh"]
WITH_USAGE = ["continue_pretraining", "custom_language", "glue", "half_hour", "mteb"]
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"


def start(script: str | Path, *words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # PATH as in an active environment, which glue.sh and mteb.sh need.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run_program("bash", EXAMPLES / script, *words, cwd=cwd, env=environment(1, PATH=path, **variables))


def succeed(script: str, *words: object, cwd: Path, **variables: str) -> str:
    ended = start(script, *words, cwd=cwd, **variables)
    assert ended.returncode == 0, ended.stderr
    return " ".join(ended.stdout.split())  # the plan is wrapped to the terminal's width


def test_scripts_parse():
    for script in SCRIPTS:
        source = script.read_text(encoding="utf-8")
        shell, separator, _ = source.partition("\n'''\n")
        if separator:  # Python code follows: bash never reads it, and for Python the shell part is a string
            compile(source, str(script), "exec")
            assert shell.splitlines()[-1].startswith("exec ")
            shell = shell.replace("''':'\n", "", 1)
        result = run_program("bash", "-n", input=shell)
        assert (result.returncode, result.stderr) == (0, ""), script


@pytest.mark.parametrize("script", [*WITH_HELP, *(f"examples/{name}.sh" for name in WITH_USAGE)])
def test_script_has_a_help_text_and_refuses_wrong_arguments_with_exit_code_2(script, tmp_path):
    asked = start(REPOSITORY / script, "--help", cwd=tmp_path)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert f"bash {script}" in asked.stdout and "set -euo" not in asked.stdout
    wrong = start(REPOSITORY / script, *(["--fast"] if script in WITH_HELP else []), cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert ("--fast" if script in WITH_HELP else "bash examples/") in wrong.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["examples/quickstart.sh run more", "tools/prepare_environment.sh --dev more"])
def test_script_refuses_extra_arguments(words, tmp_path):
    script, *extra = words.split()
    ended = start(REPOSITORY / script, *extra, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert " ".join(extra) in ended.stderr


def test_continued_pre_training_converts_once(tiny_corpus, tmp_path):
    published = write_eurobert(
        tmp_path / "published", Path(tiny_corpus.tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, num_key_value_heads=4, head_dim=8,
        max_position_embeddings=4096,
    )  # fmt: skip
    words = (published, tiny_corpus.prefix, "run", *TINY.split(), "--ffn-hidden-size", 48, "--dry-run")
    plan = succeed("continue_pretraining.sh", *words, cwd=tmp_path)
    assert "10,000 iterations" in plan
    written = (tmp_path / "run.start" / "latest_checkpointed_iteration.txt").stat().st_mtime_ns
    again = succeed("continue_pretraining.sh", *words, cwd=tmp_path)
    assert "converting" in plan and "converting" not in again
    assert (tmp_path / "run.start" / "latest_checkpointed_iteration.txt").stat().st_mtime_ns == written


def test_custom_language_prepares_raw_text_and_skips_finished_steps(tmp_path):
    texts = made_up_texts(300, letters="aäeioöuklmnprstvy")
    write_jsonl(tmp_path / "shard.jsonl", ({"text": text} for text in texts))
    flags = ("*.jsonl", "out", "--dry-run", *TINY.split())
    variables = {"VOCAB_SIZE": "400", "WORKERS": "1", "LOWERCASE": "0", "TEXT_KEY": "text"}
    plan = succeed("custom_language.sh", *flags, cwd=tmp_path, **variables)
    vocabulary = load_tokenizer(tmp_path / "out" / "tokenizer").backend.get_vocab()
    assert len(vocabulary) <= 400 and any("ä" in piece for piece in vocabulary), "LOWERCASE=0 keeps accents"
    assert f"vocabulary {len(vocabulary)}" in plan
    again = succeed("custom_language.sh", *flags, cwd=tmp_path, **variables)
    assert again.count("already there:") == 2


@pytest.mark.parametrize("script", ["glue", "mteb"])
def test_evaluation_of_a_missing_model_is_refused(script, tmp_path):
    ended = start(f"{script}.sh", ".", "results", "/nothere", cwd=tmp_path)
    assert ended.returncode == 66
    assert ended.stderr.startswith("error: --model /nothere: no such folder")
