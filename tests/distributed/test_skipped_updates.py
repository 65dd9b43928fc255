"""A loss or gradient that is not finite on one rank skips the update on all ranks, and changes no state."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import quick_only, read_metrics, train_on_ranks
from reliability.states import assert_same_tensors
from safetensors.torch import load_file
from test_layouts import DP2_OVERLAP, PP2, TP2
from test_saving import error_of_all_ranks
from tests_tiny import ITERATIONS

from megatron_neobert.checkpoint.folder import iteration_folder
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.checkpoint.train_state import read_train_state
from megatron_neobert.training import loop, step

POISONED = 4  # iteration whose loss or gradient is not finite
NAN = float("nan")


def poison(
    *, iterations: tuple[int, ...] = (POISONED,), rank: int = 0, target: str = "loss", factor: float = NAN
) -> None:
    """Multiply loss or gradient of one rank by `factor` at some iterations of the run in this process.

    Args:
        target: "loss", "gradient", or "reported loss", which changes no gradient.
    """
    train_step, compute_loss = loop.train_step, step._compute_loss

    def compute_poisoned_loss(batch, output):
        total, tokens, report = compute_loss(batch, output)
        if target == "loss":
            total = total * factor
        return total, tokens, torch.cat([report[:1] * factor, report[1:]])

    def train_poisoned(run, batches):
        if os.environ["RANK"] != str(rank) or run.state.iteration + 1 not in iterations:
            return train_step(run, batches)
        if target == "gradient":
            hook = next(run.model.parameters()).register_hook(lambda gradient: gradient * factor)
            result = train_step(run, batches)
            hook.remove()
        else:
            step._compute_loss = compute_poisoned_loss
            result = train_step(run, batches)
            step._compute_loss = compute_loss
        return result

    loop.train_step = train_poisoned


def never_skip(**options) -> None:
    """Poison a run that updates its weights all the same, and saves them."""
    poison(**options)
    step.skip_reason = lambda *args: None
    Saver._check_finite = lambda *args: None


def checkpoint_of(run, iteration: int) -> Path:
    return iteration_folder(Path(run.checkpoint.save), iteration)


def assert_no_update(run, iteration: int) -> None:
    """Assert that an iteration changed no weight, main weight, moment or step count."""
    before, after = checkpoint_of(run, iteration - 1), checkpoint_of(run, iteration)
    assert_same_tensors(after, before)
    assert read_train_state(after).optimizer_steps == read_train_state(before).optimizer_steps


CASES = {
    "one rank, loss": (1, {}, {}, {}),
    "data 2, overlapped, loss": (2, DP2_OVERLAP, {}, {"rank": 1}),
    "data 2, infinite gradient, bfloat16": (
        2,
        {},
        {"bf16": True},
        {"rank": 1, "target": "gradient", "factor": float("inf")},
    ),
    "tensor 2, loss without gradient": (2, TP2, {}, {"rank": 1, "target": "reported loss"}),
    "pipeline 2, gradient of the first stage, bfloat16": (2, PP2, {"bf16": True}, {"target": "gradient"}),
}


@pytest.mark.parametrize("case", quick_only(CASES, "data 2, overlapped, loss", "tensor 2, loss without gradient"))
def test_skipped_update_changes_no_bit_on_any_rank(settings, case):
    world_size, parallel, training, options = CASES[case]
    run = settings(parallel=parallel, training=training, checkpoint={"save_interval": 1})
    train_on_ranks(run, world_size=world_size, prepare=partial(poison, **options))
    assert_no_update(run, POISONED)
    with pytest.raises(AssertionError):  # the control
        assert_no_update(run, POISONED + 1)
    losses = read_metrics(run.checkpoint.save)
    assert list(losses) == [i for i in range(1, ITERATIONS + 1) if i != POISONED]
    assert losses[ITERATIONS] < losses[1]
    skipped = read_metrics(run.checkpoint.save, "skipped_iterations")
    assert skipped == {i: int(i >= POISONED) for i in range(1, ITERATIONS + 1)}


def test_batch_without_a_predicted_token_changes_no_bit(settings, capfd):
    """Its gradients are zero. An update would move all weights by their momentum and decay."""
    run = settings(data={"mask_prob": 2**-16}, training={"train_iters": 2}, checkpoint={"save_interval": 1})
    train_on_ranks(run)
    assert_no_update(run, 2)
    assert "the batch has no predicted token" in capfd.readouterr().out


@pytest.mark.parametrize("target", ["loss", "gradient"])
def test_without_skipping_a_nan_of_one_rank_reaches_the_weights_of_another(settings, target):
    run = settings(training={"exit_interval": POISONED})
    train_on_ranks(run, world_size=2, prepare=partial(never_skip, target=target))
    tensors = load_file(checkpoint_of(run, POISONED) / "rank_00001.safetensors")
    assert not all(tensor.isfinite().all() for tensor in tensors.values())


def test_skipped_update_uses_up_its_batch_and_its_learning_rate(settings):
    whole, skipping = settings("whole"), settings("skipping")
    train_on_ranks(whole)
    train_on_ranks(skipping, prepare=poison)
    for key in ("lr", "consumed_tokens", "cursor"):
        assert read_metrics(skipping.checkpoint.save, key) == read_metrics(whole.checkpoint.save, key), key
    expected, losses = read_metrics(whole.checkpoint.save), read_metrics(skipping.checkpoint.save)
    assert all(losses[i] == expected[i] for i in range(1, POISONED))
    assert losses[POISONED + 1] != expected[POISONED + 1]


@pytest.mark.parametrize(
    ("iterations", "optimizer"),
    [
        ((2, 4, 5, 6), "adamw"),
        ((1, 2, 3), "adamw"),  # the optimizer is saved before it has a state
        ((1, 2, 3), "muon"),
    ],
)
def test_too_many_skipped_updates_save_and_end_all_ranks(settings, iterations, optimizer):
    poison_rank_1 = partial(poison, iterations=iterations, rank=1)
    *_, first, last, _ = iterations

    def prepare() -> None:
        poison_rank_1()
        loop.MOST_SKIPPED = 2

    run = settings(training={"train_iters": 9}, optimizer={"optimizer": optimizer})
    error = error_of_all_ranks(run, prepare=prepare)
    assert error.startswith(f"70: the updates of the last 2 iterations, {first} to {last}, were skipped")
    assert (Path(run.checkpoint.save) / f"iter_{last:07}" / "MANIFEST.json").is_file()
    train_on_ranks(run, world_size=2, prepare=poison_rank_1)  # after resuming, another update may be skipped
    assert max(read_metrics(run.checkpoint.save)) == 9
