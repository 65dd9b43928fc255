"""`neobert replay` computes the batch that was trained on, and reports values that are not finite."""

import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
from commands import call, run
from ranks import read_metrics, train_on_ranks
from tests_tiny import tiny_settings

from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.commands import replay as tool
from megatron_neobert.inspection.global_batch import open_iteration
from megatron_neobert.training import step

LAST = 5  # last iteration, whose update is skipped
RARE_TOKEN = 240  # in some micro-batches of the last batch


def note_batches(folder: Path, *, poisoned: bool) -> None:
    """Record the tokens of every batch. If `poisoned`, set an embedding to NaN before the last batch."""
    original = step.compute_gradients
    if poisoned:
        Saver._check_finite = lambda *arguments: None

    def compute_gradients(run, batches):
        iteration = run.state.iteration + 1
        if poisoned and iteration == LAST:
            run.unwrapped_model.embedding.word_embeddings.weight.data[RARE_TOKEN] = float("nan")
        tokens = [batch.tokens_t.tolist() for batch in batches.micro_batches]
        with (folder / f"batches.{os.environ['RANK']}.jsonl").open("a") as stream:
            stream.write(json.dumps(tokens) + "\n")
        return original(run, batches)

    step.compute_gradients = compute_gradients


def noted_batches(folder: Path) -> list[list[list[int]]]:
    """Return the micro-batches of each global batch, in order: those of the ranks alternate."""
    paths = sorted(folder.glob("batches.*.jsonl"))
    of_ranks = [[json.loads(line) for line in path.open()] for path in paths]
    return [[micro for turn in zip(*step, strict=True) for micro in turn] for step in zip(*of_ranks, strict=True)]


@pytest.fixture(scope="module")
def trained(tiny_corpus, tmp_path_factory) -> SimpleNamespace:
    """A run of two ranks with checkpoints 2, 4 and 5, and its recorded batches.

    The settings --exit-interval and --exit-duration-in-mins must have no effect on a replay.
    """
    folder = tmp_path_factory.mktemp("replay")
    settings = tiny_settings(
        tiny_corpus,
        save=folder / "run",
        training={"train_iters": LAST, "eval_iters": 0, "exit_interval": LAST, "exit_duration_in_mins": 600},
        checkpoint={"save_interval": 2},
    )
    train_on_ranks(settings, world_size=2, prepare=functools.partial(note_batches, folder, poisoned=True))
    return SimpleNamespace(save=folder / "run", batches=noted_batches(folder))


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_replay_reports_micro_batches_and_gradients_that_are_not_finite(trained):
    before = files_of(trained.save)
    code, output, errors = run("replay", "--load", trained.save, "--iteration", LAST, "--checkpoint-iteration", LAST)
    assert code == 0, errors
    expected = [RARE_TOKEN in tokens for tokens in trained.batches[LAST - 1]]
    assert set(expected) == {True, False}
    lines = [line for line in output.splitlines() if line.startswith("micro-batch")]
    assert ["NOT FINITE" in line for line in lines] == expected
    assert "gradient norm nan" in output and "gradient NOT FINITE: decoder.layers.1.mlp" in output
    assert files_of(trained.save) == before


@pytest.mark.slow
def test_replay_has_the_tokens_loss_and_gradient_norm_of_training(trained, tmp_path, capfd):
    iteration = 3  # the first after a checkpoint, so that the weights are the same
    settings, checkpoint = open_iteration(trained.save, iteration, [])
    assert checkpoint == trained.save / "iter_0000002"

    def prepare() -> None:
        note_batches(tmp_path, poisoned=False)
        ranks.run_training = lambda settings, watcher: tool.compute_batch(
            settings, iteration, weights=checkpoint, position=checkpoint
        )

    train_on_ranks(settings, prepare=prepare)
    assert noted_batches(tmp_path) == [trained.batches[iteration - 1]]
    loss, grad_norm = (read_metrics(trained.save, key)[iteration] for key in ("loss", "grad_norm"))
    assert f"loss {loss:.4f} nats | gradient norm {grad_norm:.3f}\n" in capfd.readouterr().out


def test_missing_checkpoint_is_refused(trained):
    code, _, errors = call("replay", "--load", trained.save, "--iteration", 4, "--checkpoint-iteration", 3)
    assert code == 66 and "no checkpoint of iteration 3" in errors
