"""The speedrun: p is that of an exact test, the time is training time, and the script runs unfinished runs only."""

import os
from pathlib import Path

import numpy as np
import pytest
from commands import REPOSITORY, run_forked, succeed
from json_files import read_json, write_jsonl
from scipy import stats

from benchmarks import speedrun

RECIPE = """
model: {{num_layers: 2, hidden_size: 64, num_attention_heads: 4, max_position_embeddings: 128}}
data: {{seq_length: 128, num_workers: 0}}
optimizer: {{lr: {lr}, lr_warmup_iters: 1}}
training: {{micro_batch_size: 8, global_batch_size: 8, train_iters: 4, eval_iters: 1}}
logging: {{log_interval: 2}}
"""


def write_runs(folder: Path, *, losses: list[float], speed: float = 1000.0) -> Path:
    """Write runs with two intervals of 5,000 tokens, the second at twice the speed, and a validation after each."""
    for seed, loss in enumerate(losses):
        lines = [
            {"iteration": 1, "consumed_tokens": 5000, "tokens_per_second": speed},
            {"iteration": 1, "validation_loss": 9.0},
            {"iteration": 2, "consumed_tokens": 10_000, "tokens_per_second": 2 * speed},
            {"iteration": 2, "validation_loss": loss},
        ]
        write_jsonl(folder / f"seed_{seed}" / "metrics.jsonl", lines)
    return folder


def test_p_equals_that_of_scipys_exact_permutation_test():
    for differences in np.random.default_rng(0).normal(-0.5, 1.0, size=(5, 9)):
        expected = stats.permutation_test(
            (differences,), np.mean, permutation_type="samples", alternative="less", n_resamples=np.inf
        )
        assert speedrun.p_below(list(differences)) == pytest.approx(expected.pvalue)
    assert speedrun.p_below([-1.0] * 10) == 1 / 1024
    assert speedrun.p_below([1.0] * 10) == 1.0


def test_recipes_are_compared_seed_by_seed_with_the_first(tmp_path):
    plain = write_runs(tmp_path / "plain", losses=[3.9] * 8)
    fast = write_runs(tmp_path / "fast", losses=[4.1] * 8, speed=2000.0)
    figures = tmp_path / "figures.json"
    ended = run_forked("benchmarks/speedrun.py", plain, fast, "--target", 4.0, "--output", figures)
    assert ended.code == 0, ended.output
    written = read_json(figures)
    assert [line["p (below 4)"] for line in written["recipes"]] == ["0.0039", "1.0000"]
    (comparison,) = written["comparisons"]
    assert [comparison[name] for name in ("time", "fastest", "slowest")] == ["0.500"] * 3
    assert comparison["p (less time)"] == "0.0039"


def test_one_seed_gives_losses_and_times_without_deviations(tmp_path):
    plain, fast = (write_runs(tmp_path / name, losses=[loss]) for name, loss in (("plain", 3.9), ("fast", 4.1)))
    ended = run_forked("benchmarks/speedrun.py", plain, fast, "--target", 4.0, "--output", tmp_path / "figures.json")
    assert ended.code == 0, ended.output
    written = read_json(tmp_path / "figures.json")
    assert [line["loss"] for line in written["recipes"]] == ["3.9000", "4.1000"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "seed_1").rename(folder / "seed_9"), "run the same seeds"),
        (
            lambda folder: (folder / "seed_1" / "metrics.jsonl").open("a").write('{"iteration": 3, "loss": 1.0}\n'),
            "has not been validated after iteration 3",
        ),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, change, message):
    plain, other = (write_runs(tmp_path / name, losses=[3.9, 4.0]) for name in ("plain", "other"))
    change(other)
    ended = run_forked("benchmarks/speedrun.py", plain, other, "--target", 4.0)
    assert ended.code in (65, 66) and message in ended.output, ended.output


@pytest.mark.slow
def test_the_script_runs_every_seed_of_every_recipe_once(tiny_corpus, tmp_path):
    recipes = []
    for name, rate in (("plain", 1e-3), ("other", 2e-3)):
        recipes.append(tmp_path / f"{name}.yaml")
        recipes[-1].write_text(RECIPE.format(lr=rate))
    corpus, tokenizer = tiny_corpus.prefix, tiny_corpus.tokenizer
    variables = {"DATA": corpus, "VALIDATION": f"{corpus}:min=20", "TOKENIZER": tokenizer, "TARGET": "9", "SEEDS": "2"}
    environment = os.environ | variables | {"FOLDER": str(tmp_path / "speedrun")}
    for _ in range(2):
        printed = succeed("bash", REPOSITORY / "examples" / "speedrun.sh", *recipes, env=environment)
    assert printed.count("already trained: iteration 4 of 4 is saved") == 4
    written = read_json(tmp_path / "speedrun" / "speedrun.json")
    assert [(line["recipe"], line["seeds"]) for line in written["recipes"]] == [("plain", 2), ("other", 2)]
