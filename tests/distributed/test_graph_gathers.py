"""A CUDA graph and the validations between its replays gather the weights of other ranks.

A CPU has no CUDA graph. The emulated graph repeats the captured step with its collectives, and leaves the Python state
of Megatron's DDP as it was, because a replay runs no Python.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from megatron.core.distributed import param_and_grad_buffer
from ranks import read_metrics, train_on_ranks

from megatron_neobert.data.batches.batch import RankBatches
from megatron_neobert.state import Run
from megatron_neobert.training import cuda_graph, loop, setup
from megatron_neobert.training.step import run_schedule

ITERATIONS = 10
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 20_000}
GATHERS: Counter[str] = Counter()  # all-gathers of weights in this process


class EmulatedGraph:
    """A captured step on a CPU. Capturing computes what the first call of `replay` would compute."""

    def __init__(self, schedule: cuda_graph.GraphedSchedule, run: Run, inputs: RankBatches) -> None:
        self.schedule, self.run, self.inputs = schedule, run, inputs
        before = GATHERS.total()
        schedule._reports = run_schedule(run, inputs)
        self.gathers = GATHERS.total() - before
        self.is_computed = True

    def replay(self) -> None:
        if not self.is_computed:
            groups = self.run.model.bucket_groups
            before = [group.param_gather_dispatched for group in groups]
            for group in groups:
                group.param_gather_dispatched = self.gathers == 0
            self.schedule._reports = run_schedule(self.run, self.inputs)
            for group, was_dispatched in zip(groups, before, strict=True):
                group.param_gather_dispatched = was_dispatched
        self.is_computed = False


def use_emulated_graph(*, marks_weights: bool = True) -> None:
    """Give the run of this process an emulated graph. With `marks_weights` False, flags of DDP stay.

    The process prints the number of all-gathers of each captured step and each validation.
    """

    def with_graph(*arguments: Any, **options: Any) -> Run:
        run = build_run(*arguments, **options)
        run.graph = cuda_graph.GraphedSchedule()
        return run

    def capture(schedule: cuda_graph.GraphedSchedule, run: Run, inputs: RankBatches) -> EmulatedGraph:
        graph = EmulatedGraph(schedule, run, inputs)
        print(f"captured: {graph.gathers} gathers")
        return graph

    def counted_validation(run: Run, batches: RankBatches) -> Any:
        before = GATHERS.total()
        result = validate(run, batches)
        print(f"validated: {GATHERS.total() - before} gathers")
        return result

    def counted_gather(*arguments: Any, **options: Any) -> Any:
        GATHERS["weights"] += 1
        return gather(*arguments, **options)

    build_run, validate, gather = loop.build_run, loop.validation_step, param_and_grad_buffer.dist_all_gather_func
    loop.build_run, loop.validation_step = with_graph, counted_validation
    param_and_grad_buffer.dist_all_gather_func = counted_gather
    cuda_graph.GraphedSchedule._capture = capture
    if not marks_weights:
        cuda_graph.mark_weights_as_updated = lambda run: None
    use_padding_to_capacity()


def use_padding_to_capacity() -> None:
    """Build batches as on CUDA. Otherwise each step has other shapes, and no graph fits twice."""
    build = setup.build_stream
    setup.build_stream = lambda settings, inputs, **_: build(settings, inputs, pads_to_capacity=True)


@pytest.fixture
def run(settings: Callable[..., Any]) -> Callable[..., str]:
    """Return a function that trains on two ranks and returns the folder with the metrics."""

    def train(name: str, eval_interval: int, prepare: Callable[[], None]) -> str:
        training = {"train_iters": ITERATIONS, "eval_interval": eval_interval}
        built = settings(name, training=training, parallel=OVERLAP)
        train_on_ranks(built, world_size=2, prepare=prepare)
        return built.checkpoint.save

    return train


# Each iteration: a validation is between the first step and the captured one. Each fourth: after replays only.
@pytest.mark.parametrize("eval_interval", [1, 4])
def test_captured_step_and_validations_gather_all_weights_and_give_the_losses_without_a_graph(
    run, eval_interval, capfd
):
    expected = run("eager", eval_interval, use_padding_to_capacity)
    graphed = run("graph", eval_interval, use_emulated_graph)
    for metric in ("loss", "grad_norm", "validation_loss"):
        assert read_metrics(graphed, metric) == read_metrics(expected, metric)
    kinds, gathers = zip(*re.findall(r"(captured|validated): (\d+) gathers", capfd.readouterr().out), strict=True)
    assert set(kinds) == {"captured", "validated"}
    assert len(set(gathers)) == 1 and int(gathers[0]) > 1
    control = run("control", eval_interval, partial(use_emulated_graph, marks_weights=False))
    assert "validated: 0 gathers" in capfd.readouterr().out
    assert read_metrics(control, "validation_loss") != read_metrics(expected, "validation_loss")
