"""The example scripts beside pretrain_neobert.sh: each is started, by --dry-run or at toy size, and explains itself."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
STAGE1 = ("stage1.sh", "single_gpu.sh", "eight_gpus.sh")
OTHERS = ("stage2.sh", "continue_pretraining.sh", "custom_language.sh", "glue.sh", "mteb.sh")
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")


def start(script: str | Path, *words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    # `python` as with the environment active, which is what glue.sh and mteb.sh begin with.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**clean, "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "PATH": path, **variables}
    command = ["bash", str(EXAMPLES / script), *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


def succeed(script: str, *words: object, cwd: Path, **variables: str) -> str:
    ended = start(script, *words, cwd=cwd, **variables)
    assert ended.returncode == 0, ended.stderr
    return " ".join(ended.stdout.split())  # the plan is wrapped to the terminal's width


@pytest.fixture(scope="module")
def published(tiny_corpus, tmp_path_factory) -> Path:
    """A Hugging Face folder with a tiny model for the tokenizer of the tiny corpus, as somebody might publish it."""
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("published")
    config = EuroBertConfig(
        vocab_size=tiny_corpus.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        mask_token_id=4,
    )
    EuroBertForMaskedLM(config).save_pretrained(folder)
    load_tokenizer(Path(tiny_corpus.tokenizer)).save_tokenizer_files(folder, model_max_length=4096)
    return folder


@pytest.mark.parametrize("script", [*STAGE1, *OTHERS])
def test_script_shows_how_it_is_called(script, tmp_path):
    asked = start(script, "--help", cwd=tmp_path)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert f"bash examples/{script} " in asked.stdout
    bare = start(script, cwd=tmp_path)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert "bash examples/" in bare.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("script", "ranks"), [("stage1.sh", 4), ("single_gpu.sh", 1), ("eight_gpus.sh", 8)])
def test_stage_1_prints_its_plan_for_the_ranks_of_the_script(script, ranks, tiny_corpus, tmp_path):
    given = {"NPROC_PER_NODE": "4"} if script == "stage1.sh" else {}
    words = (tiny_corpus.prefix, tiny_corpus.tokenizer, "run", "--dry-run", "--seq-length", "512")
    plan = succeed(script, *words, cwd=tmp_path, **given)
    assert f"{ranks} data-parallel" in plan
    assert f"2,048 rows x 512 tokens = {2048 * 512:,} tokens" in plan, "the script's recipe, and the flag over it"


def test_continued_pre_training_converts_once_and_stage_2_goes_on_from_a_checkpoint(published, tiny_corpus, tmp_path):
    words = (published, tiny_corpus.prefix, "run", *TINY.split(), "--ffn-hidden-size", 48, "--dry-run")
    plan = succeed("continue_pretraining.sh", *words, cwd=tmp_path)
    assert "10,000 iterations" in plan
    written = (tmp_path / "run.start" / "latest_checkpointed_iteration.txt").stat().st_mtime_ns
    again = succeed("continue_pretraining.sh", *words, cwd=tmp_path)
    assert "converting" in plan and "converting" not in again
    assert (tmp_path / "run.start" / "latest_checkpointed_iteration.txt").stat().st_mtime_ns == written

    words = (tiny_corpus.prefix, tiny_corpus.tokenizer, "run.start", "stage2", *TINY.split(), "--ffn-hidden-size", 48)
    shorter = ("--data-path", 0.5, tiny_corpus.prefix, 0.5, f"{tiny_corpus.prefix}:min=32")  # no document has 1,024
    plan = succeed("stage2.sh", *words, *shorter, "--dry-run", cwd=tmp_path)
    assert "512 rows x 4,096 tokens" in plan


def test_stage_2_asks_for_the_long_documents_of_the_paper(tiny_corpus, tmp_path):
    words = (tiny_corpus.prefix, tiny_corpus.tokenizer, "stage1", "stage2", "--dry-run")
    refused = start("stage2.sh", *words, cwd=tmp_path)
    assert refused.returncode != 0
    assert "min=1024" in refused.stderr, "the tiny corpus has none"


def test_custom_language_goes_from_raw_text_to_a_plan_and_keeps_finished_steps(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("aäeioöuklmnprstvy", k=rng.randint(2, 8))) for _ in range(300)]
    texts = [" ".join(rng.choices(words, k=rng.randint(5, 80))) for _ in range(300)]
    (tmp_path / "shard.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ("*.jsonl", "out", "--dry-run", *TINY.split())
    variables = {"VOCAB_SIZE": "400", "WORKERS": "1", "LOWERCASE": "0", "TEXT_KEY": "text"}
    plan = succeed("custom_language.sh", *flags, cwd=tmp_path, **variables)
    vocabulary = (tmp_path / "out" / "tokenizer" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert len(vocabulary) <= 400 and any("ä" in piece for piece in vocabulary), "capitals and accents were to be kept"
    assert f"vocabulary {len(vocabulary)}" in plan
    again = succeed("custom_language.sh", *flags, cwd=tmp_path, **variables)
    assert again.count("already there:") == 2


@pytest.mark.parametrize("script", ["continue_pretraining.sh", "custom_language.sh"])
def test_environment_that_cannot_be_prepared_ends_the_script_before_it_makes_anything(script, tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "examples" / script).write_bytes((EXAMPLES / script).read_bytes())
    (tmp_path / "tools" / "prepare_environment.sh").write_text("echo no network >&2; exit 7\n")
    before = sorted(tmp_path.rglob("*"))
    ended = start(tmp_path / "examples" / script, "input", "output", "run", cwd=tmp_path, PYTHON="")
    assert (ended.returncode, ended.stderr) == (7, "no network\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_glue_script_without_its_data_names_the_command_that_fetches_them(tmp_path):
    ended = start("glue.sh", "no_data", "results", "model", cwd=tmp_path)
    assert ended.returncode == 66
    assert ended.stderr.startswith("error: --data-dir no_data: no such folder; on a machine with network: ")
    assert "neobert fetch glue" in ended.stderr


def test_mteb_script_without_a_model_names_it(tmp_path):
    ended = start("mteb.sh", "no_data", "results", "model", cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (66, 1)
    assert ended.stderr.startswith("error: --model model: no such folder")
