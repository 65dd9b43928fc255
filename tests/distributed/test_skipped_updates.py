"""A loss or gradient that is not finite on one rank skips the update on all ranks, and changes no state."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import quick_only, read_metrics, train_on_ranks
from test_layouts import DP2_OVERLAP, PP2, TP2
from test_saving import error_of_all_ranks
from tests_tiny import ITERATIONS

from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.training import loop, step

POISONED = 4  # iteration whose loss or gradient is not finite
NAN = float("nan")


@dataclass(frozen=True)
class Poison:
    """Multiplies loss or gradient of one rank by `factor` at some iterations, and records the effect on the weights.

    `train_on_ranks` calls an instance in each process before training.
    """

    folder: Path  # notes.RANK.jsonl gets a line for each poisoned iteration
    iterations: tuple[int, ...] = (POISONED,)
    rank: int = 0
    target: str = "loss"  # or "gradient", or "reported loss", which changes no gradient
    factor: float = NAN
    skips: bool = True  # False for the control

    def __call__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        loop.train_step = functools.partial(self._train_step, loop.train_step)
        if not self.skips:
            step.skip_reason = lambda *args, **kwargs: None
            Saver._check_finite = lambda *args: None

    def _train_step(self, original, run, batches):
        iteration = run.state.iteration + 1
        if iteration not in self.iterations:
            return original(run, batches)
        before = state_of(run)
        with self._poisoned(run) if self.rank == rank() else contextlib.nullcontext():
            result = original(run, batches)
        after = state_of(run)
        with (self.folder / f"notes.{rank()}.jsonl").open("a") as stream:
            note = {
                "iteration": iteration,
                "reason": result.skip_reason,
                "unchanged": before.keys() == after.keys() and all(same_bits(before[k], after[k]) for k in before),
                "finite": all(bool(tensor.isfinite().all()) for tensor in after.values()),
            }
            stream.write(json.dumps(note) + "\n")
        return result

    @contextlib.contextmanager
    def _poisoned(self, run) -> Iterator[None]:
        if self.target == "gradient":
            parameter = next(run.model.parameters())
            handle = parameter.register_hook(lambda gradient: gradient * self.factor)
            yield
            handle.remove()
        else:
            original = step._compute_loss
            step._compute_loss = functools.partial(self._compute_loss, original)
            yield
            step._compute_loss = original

    def _compute_loss(self, original, batch, output):
        total, tokens, report = original(batch, output)
        if self.target == "loss":
            total = total * self.factor
        return total, tokens, torch.cat([report[:1] * self.factor, report[1:]])

    def notes(self) -> list[dict]:
        """Return the notes of all ranks."""
        return [json.loads(line) for path in self.folder.glob("notes.*") for line in path.open()]


def rank() -> int:
    return int(os.environ["RANK"])


def state_of(run) -> dict[str, torch.Tensor]:
    """Return copies of weights, main weights, moments and step counts of this rank."""
    if run.model.ddp_config.overlap_param_gather:
        run.model.start_param_sync(force_sync=True)  # gather the latest weights of other ranks
    tensors = dict(run.model.named_parameters())
    optimizers = run.optimizer.chained_optimizers
    main = (value for optimizer in optimizers for value in optimizer.get_parameters())
    tensors |= {f"main {i}": value for i, value in enumerate(main)}
    for number, state in enumerate(state for optimizer in optimizers for state in optimizer.state.values()):
        tensors |= {f"{name} {number}": value for name, value in state.items()}
    for number, group in enumerate(run.optimizer.param_groups):
        tensors[f"step {number}"] = torch.tensor(group.get("step", 0))
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


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
def test_skipped_update_changes_no_bit_on_any_rank(settings, tmp_path, case):
    world_size, parallel, training, options = CASES[case]
    poison = Poison(tmp_path / "notes", **options)
    run = settings(parallel=parallel, training=training)
    train_on_ranks(run, world_size=world_size, prepare=poison)
    notes = poison.notes()
    assert len(notes) == world_size
    assert all(note["unchanged"] and note["finite"] and note["reason"] for note in notes), notes
    assert len({note["reason"] for note in notes}) == 1
    losses = read_metrics(run.checkpoint.save)
    assert list(losses) == [i for i in range(1, ITERATIONS + 1) if i != POISONED]
    assert losses[ITERATIONS] < losses[1]
    skipped = read_metrics(run.checkpoint.save, "skipped_iterations")
    assert skipped == {i: int(i >= POISONED) for i in range(1, ITERATIONS + 1)}


def test_batch_without_a_predicted_token_changes_no_bit(settings, tmp_path):
    """Its gradients are zero. An update would move all weights by their momentum and decay."""
    poison = Poison(tmp_path / "notes", iterations=(2,), factor=1.0)
    train_on_ranks(settings(data={"mask_prob": 2**-16}, training={"train_iters": 2}), prepare=poison)
    (note,) = poison.notes()
    assert note["unchanged"] and note["reason"] == "the batch has no predicted token"


@pytest.mark.parametrize("target", ["loss", "gradient"])
def test_without_skipping_a_nan_of_one_rank_reaches_the_weights_of_all_ranks(settings, tmp_path, target):
    poison = Poison(tmp_path / "notes", target=target, rank=1, skips=False)
    run = settings()
    train_on_ranks(run, world_size=2, prepare=poison)
    assert [(note["finite"], note["unchanged"]) for note in poison.notes()] == [(False, False)] * 2


def test_skipped_update_uses_up_its_batch_and_its_learning_rate(settings, tmp_path):
    whole, skipping = settings("whole"), settings("skipping")
    train_on_ranks(whole)
    train_on_ranks(skipping, prepare=Poison(tmp_path / "notes"))
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
def test_too_many_skipped_updates_save_and_end_all_ranks(settings, tmp_path, iterations, optimizer):
    poison = Poison(tmp_path / "notes", iterations=iterations, rank=1)
    *_, first, last, _ = iterations

    def prepare() -> None:
        poison()
        loop.MOST_SKIPPED = 2

    run = settings(training={"train_iters": 9}, optimizer={"optimizer": optimizer})
    error = error_of_all_ranks(run, prepare=prepare)
    assert error.startswith(f"70: the updates of the last 2 iterations, {first} to {last}, were skipped")
    assert (Path(run.checkpoint.save) / f"iter_{last:07}" / "MANIFEST.json").is_file()
    train_on_ranks(run, world_size=2, prepare=poison)  # after resuming, another update may be skipped
    assert max(read_metrics(run.checkpoint.save)) == 9
