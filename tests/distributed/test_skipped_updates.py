"""A loss or gradient that is not finite on one rank costs its batch and nothing else."""

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

POISONED = 4  # the iteration whose loss or gradient is broken
NAN = float("nan")


@dataclass(frozen=True)
class Poison:
    """Breaks the loss or the gradient of one rank at some iterations, and notes what the step does to the weights.

    An instance is the hook of `train_on_ranks`: called in every rank's process before training.
    """

    folder: Path  # one line per rank and broken iteration goes to notes.RANK.jsonl
    iterations: tuple[int, ...] = (POISONED,)
    rank: int = 0
    of: str = "loss"  # or "gradient" alone, or "reported loss" alone
    factor: float = NAN
    guarded: bool = True  # without: the control

    def __call__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        loop.train_step = functools.partial(self._train_step, loop.train_step)
        if not self.guarded:
            step.skip_reason = lambda *args, **kwargs: None
            Saver._refuse_values_not_finite = lambda *args: None

    def _train_step(self, original, run, batches):
        iteration = run.state.iteration + 1
        if iteration not in self.iterations:
            return original(run, batches)
        before = state_of(run)
        with self._broken(run) if self.rank == rank() else contextlib.nullcontext():
            report = original(run, batches)
        after = state_of(run)
        with (self.folder / f"notes.{rank()}.jsonl").open("a") as stream:
            note = {
                "iteration": iteration,
                "reason": report.skip_reason,
                "unchanged": before.keys() == after.keys() and all(same_bits(before[k], after[k]) for k in before),
                "finite": all(bool(tensor.isfinite().all()) for tensor in after.values()),
            }
            stream.write(json.dumps(note) + "\n")
        return report

    @contextlib.contextmanager
    def _broken(self, run) -> Iterator[None]:
        if self.of == "gradient":
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
        if self.of == "loss":
            total = total * self.factor
        return total, tokens, torch.cat([report[:1] * self.factor, report[1:]])

    def notes(self) -> list[dict]:
        """Of all ranks."""
        return [json.loads(line) for path in self.folder.glob("notes.*") for line in path.open()]


def rank() -> int:
    return int(os.environ["RANK"])


def state_of(run) -> dict[str, torch.Tensor]:
    """Copies of weights, main weights, moments and step counts of this rank."""
    if run.model.ddp_config.overlap_param_gather:
        run.model.start_param_sync(force_sync=True)  # the newest weights of the other ranks
    tensors = dict(run.model.named_parameters())
    chained = run.optimizer.chained_optimizers
    main = (value for one in chained for value in one.get_parameters())
    tensors |= {f"main {i}": value for i, value in enumerate(main)}
    for number, state in enumerate(state for one in chained for state in one.state.values()):
        tensors |= {f"{name} {number}": value for name, value in state.items()}
    for number, group in enumerate(run.optimizer.param_groups):
        tensors[f"step {number}"] = torch.tensor(group.get("step", 0))
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


CASES = {
    "one rank, loss": (1, {}, {}, {}),
    "data 2, overlapped, loss": (2, DP2_OVERLAP, {}, {"rank": 1}),
    "data 2, whole optimizer, infinite gradient, bfloat16": (
        2,
        {"use_distributed_optimizer": False},
        {"bf16": True},
        {"rank": 1, "of": "gradient", "factor": float("inf")},
    ),
    "tensor 2, loss without gradient": (2, TP2, {}, {"rank": 1, "of": "reported loss"}),
    "tensor 2 x data 2, whole optimizer, gradient": (
        4,
        {**TP2, "use_distributed_optimizer": False},
        {},
        {"rank": 3, "of": "gradient"},
    ),
    "pipeline 2, gradient of the first stage, bfloat16": (2, PP2, {"bf16": True}, {"of": "gradient"}),
    "pipeline 2, loss of the last stage": (2, PP2, {}, {"rank": 1}),
}


@pytest.mark.parametrize("case", quick_only(CASES, "data 2, overlapped, loss", "tensor 2, loss without gradient"))
def test_a_broken_step_of_one_rank_changes_no_bit_on_any_rank(settings, tmp_path, case):
    world_size, parallel, training, broken = CASES[case]
    poison = Poison(tmp_path / "notes", **broken)
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


@pytest.mark.parametrize("of", ["loss", "gradient"])
def test_without_the_guard_one_broken_step_of_one_rank_spoils_the_weights_of_all(settings, tmp_path, of):
    poison = Poison(tmp_path / "notes", of=of, rank=1, guarded=False)
    run = settings()
    train_on_ranks(run, world_size=2, prepare=poison)
    assert [(note["finite"], note["unchanged"]) for note in poison.notes()] == [(False, False)] * 2


def test_a_skipped_step_takes_its_batch_and_its_rate_and_the_next_goes_on_with_the_schedule(settings, tmp_path):
    whole, skipping = settings("whole"), settings("skipping")
    train_on_ranks(whole)
    train_on_ranks(skipping, prepare=Poison(tmp_path / "notes"))
    for key in ("lr", "consumed_tokens", "cursor"):
        assert read_metrics(skipping.checkpoint.save, key) == read_metrics(whole.checkpoint.save, key), key
    before = range(1, POISONED)
    expected, losses = read_metrics(whole.checkpoint.save), read_metrics(skipping.checkpoint.save)
    assert [losses[i] for i in before] == [expected[i] for i in before]
    assert losses[POISONED + 1] != expected[POISONED + 1]


@pytest.mark.parametrize(
    ("iterations", "optimizer", "is_distributed"),
    [
        ((2, 4, 5, 6), "adamw", True),
        ((1, 2, 3), "adamw", True),  # the optimizer has no state yet when it is saved
        ((1, 2, 3), "muon", False),
    ],
)
def test_too_many_skipped_updates_in_a_row_end_all_ranks_with_a_checkpoint(
    settings, tmp_path, iterations, optimizer, is_distributed
):
    poison = Poison(tmp_path / "notes", iterations=iterations, rank=1)
    *_, first, last, _ = iterations

    def prepare() -> None:
        poison()
        loop.MOST_SKIPPED = 2

    run = settings(
        training={"train_iters": 9},
        optimizer={"optimizer": optimizer},
        parallel={"use_distributed_optimizer": is_distributed},
    )
    run = run.with_section("checkpoint", load=run.checkpoint.save)
    error = error_of_all_ranks(run, prepare=prepare)
    assert error.startswith(f"70: the updates of the last 2 iterations, {first} to {last}, were skipped")
    assert (Path(run.checkpoint.save) / f"iter_{last:07}" / "MANIFEST.json").is_file()
    train_on_ranks(run, world_size=2, prepare=poison)  # the start after that may skip another one
    assert max(read_metrics(run.checkpoint.save)) == 9
