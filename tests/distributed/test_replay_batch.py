"""`neobert replay` computes the batch that was trained on, and reports values that are not finite."""

from pathlib import Path

import pytest
from commands import call, run_forked
from ranks import read_metrics, train_on_ranks
from tests_tiny import tiny_settings

from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.data.batches.batch import RankPosition
from megatron_neobert.data.batches.corpora import open_phases
from megatron_neobert.inspection.global_batch import open_iteration, rebuild_batch
from megatron_neobert.training import step

LAST = 5  # last iteration, whose update is skipped
RARE_TOKEN = 240  # in some micro-batches of the last batch


def poison_the_last_batch() -> None:
    """Set an embedding to NaN before the last batch."""
    compute_gradients = step.compute_gradients
    Saver._check_finite = lambda *arguments: None

    def compute_poisoned(run, batches):
        if run.state.iteration + 1 == LAST:
            run.unwrapped_model.embedding.word_embeddings.weight.data[RARE_TOKEN] = float("nan")
        return compute_gradients(run, batches)

    step.compute_gradients = compute_poisoned


@pytest.fixture(scope="module")
def trained(tiny_corpus, tmp_path_factory) -> Path:
    """Save folder of a run of two ranks with checkpoints 2, 4 and 5.

    The settings --exit-interval and --exit-duration-in-mins must have no effect on a replay.
    """
    save = tmp_path_factory.mktemp("replay") / "run"
    settings = tiny_settings(
        tiny_corpus,
        save=save,
        training={"train_iters": LAST, "eval_iters": 0, "exit_interval": LAST, "exit_duration_in_mins": 600},
        checkpoint={"save_interval": 2},
    )
    train_on_ranks(settings, world_size=2, prepare=poison_the_last_batch)
    return save


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_replay_reports_micro_batches_and_gradients_that_are_not_finite(trained):
    before = files_of(trained)
    ended = run_forked("replay", "--load", trained, "--iteration", LAST, "--checkpoint-iteration", LAST)
    assert ended.code == 0, ended.output
    settings, checkpoint = open_iteration(trained, LAST, [])
    batch = rebuild_batch(settings, open_phases(settings), LAST, checkpoint=checkpoint)
    expected = [RARE_TOKEN in micro_batch.tokens_t for micro_batch in batch.for_rank(RankPosition()).micro_batches]
    assert set(expected) == {True, False}
    lines = [line for line in ended.output.splitlines() if line.startswith("micro-batch")]
    assert ["NOT FINITE" in line for line in lines] == expected
    assert "gradient norm nan" in ended.output and "gradient NOT FINITE: decoder.layers.1.mlp" in ended.output
    assert files_of(trained) == before


@pytest.mark.slow
def test_replay_has_the_loss_and_gradient_norm_of_training(trained):
    iteration = 3  # the first after a checkpoint, so that the weights are the same
    ended = run_forked("replay", "--load", trained, "--iteration", iteration)
    losses, grad_norms = read_metrics(trained), read_metrics(trained, "grad_norm")
    figures = {i: f"loss {losses[i]:.4f} nats | gradient norm {grad_norms[i]:.3f}\n" for i in losses}
    assert [i for i, figure in figures.items() if figure in ended.output] == [iteration], ended.output


def test_missing_checkpoint_is_refused(trained):
    code, _, errors = call("replay", "--load", trained, "--iteration", 4, "--checkpoint-iteration", 3)
    assert code == 66 and "no checkpoint of iteration 3" in errors
