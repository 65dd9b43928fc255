"""Two ranks over NCCL give the losses of one rank. On one GPU, each rank is a node whose network is loopback."""

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import BASH, environment, flags_of, free_port, read_metrics
from tests_tiny import tiny_settings

from megatron_neobert.config.schema import Settings

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_gpu]
STEPS = 20
LOSS = 2e-3  # on an H200: 5e-4 in FP8, 9e-5 otherwise; with half of the documents, 0.1
LOCAL = {"transformer_impl": "local"}
ENGINE = {"transformer_impl": "transformer_engine"}
GRAPH = {"cuda_graph_impl": "full_iteration"}
TP2, PP2, CP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context"))
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 100_000}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "data 2": {"compute": LOCAL},
    "data 2, overlapped, graph": {"compute": ENGINE | GRAPH, "parallel": OVERLAP},
    "data 2, FP8, graph": {"compute": ENGINE | GRAPH | {"fp8_format": "hybrid", "fp8_recipe": "delayed"}},
    "tensor 2, graph": {"compute": ENGINE | GRAPH, "parallel": TP2},
    "context 2, graph": {"compute": ENGINE | GRAPH, "parallel": CP2},
    "pipeline 2": {"compute": LOCAL, "parallel": PP2},
}  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(tiny_corpus, tmp_path_factory) -> Callable[..., dict[int, float]]:
    """Return a function that trains on one rank, once per batch size and kernels, and returns the losses."""

    @functools.cache
    def losses(kernels: frozenset[tuple[str, Any]], global_batch_size: int = 8) -> dict[int, float]:
        save = tmp_path_factory.mktemp("one_rank")
        batch = {"global_batch_size": global_batch_size}
        train(run_of(tiny_corpus, save, training=batch, compute=dict(kernels)), ranks=1)
        return read_metrics(save)

    return losses


def run_of(corpus: Any, save: Path, *, compute: dict[str, Any], **sections: dict[str, Any]) -> Settings:
    compute = {"cuda_graph_impl": "none"} | compute
    model = {"num_layers": 4, "hidden_size": 256}
    settings = tiny_settings(corpus, save=save, model=model, compute=compute, **sections)
    return settings.with_section("training", train_iters=STEPS, eval_interval=STEPS, bf16=True)


def train(settings: Settings, *, ranks: int) -> None:
    """Train with a launcher per node, and fail with their output if one fails."""
    nodes = min(ranks, max(1, ranks // torch.cuda.device_count()))
    where = {"NNODES": nodes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NCCL_SOCKET_IFNAME": "lo"}
    launchers = [
        # NCCL takes ranks on one GPU for a mistake, unless they are on different hosts.
        subprocess.Popen(
            [*BASH, *flags_of(settings)],
            env=environment(ranks // nodes, NODE_RANK=node, NCCL_HOSTID=f"node {node}", **where),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(nodes)
    ]
    outputs = [launcher.communicate()[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * nodes, "\n".join(outputs)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_over_nccl_give_the_losses_of_one_rank(tiny_corpus, one_rank, tmp_path, name):
    sections = CASES[name]
    train(run_of(tiny_corpus, tmp_path, **sections), ranks=2)
    losses, kernels = read_metrics(tmp_path), frozenset(sections["compute"].items() - GRAPH.items())
    expected, control = one_rank(kernels), one_rank(frozenset(LOCAL.items()), global_batch_size=4)
    gaps = [max(abs(losses[step] / other[step] - 1) for step in losses) for other in (expected, control)]
    print(f"{name}: {gaps[0]:.2g}, control with half of the documents {gaps[1]:.2g}")
    assert len(losses) == STEPS
    assert gaps[0] <= LOSS < gaps[1]


def test_validations_between_replays_of_a_graph_use_the_weights_of_the_last_update(tiny_corpus, tmp_path):
    """The loss of the training step and of the validation are those without a graph, whichever iterations validate.

    Validations after iterations 1 to 8: the first is before the captured step. Others, 6 and 8 among them, and those
    after 4 and 8 alone, are after replays.
    """

    def validated(name: str, eval_interval: int, **compute: Any) -> dict[int, tuple[float, float]]:
        save = tmp_path / name
        run = run_of(tiny_corpus, save, compute=LOCAL | compute, parallel=OVERLAP)
        train(run.with_section("training", train_iters=8, eval_interval=eval_interval), ranks=2)
        losses, validations = read_metrics(save), read_metrics(save, "validation_loss")
        assert sorted(validations) == list(range(eval_interval, 9, eval_interval))
        return {iteration: (losses[iteration], validations[iteration]) for iteration in validations}

    expected = validated("eager", 1)
    for eval_interval in (1, 4):
        losses = validated(f"graph_{eval_interval}", eval_interval, **GRAPH)
        gaps = [largest_gap(losses, expected, late=late) for late in (0, 1)]
        print(f"every {eval_interval}: {gaps[0]:.2g}, control one update late {gaps[1]:.2g}")
        assert gaps[0] <= LOSS < gaps[1]


def largest_gap(
    losses: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]], *, late: int
) -> float:
    """Return the largest relative difference of losses to those `late` iterations earlier."""
    return max(
        abs(loss / other - 1)
        for iteration in losses
        if iteration > late
        for loss, other in zip(losses[iteration], expected[iteration - late], strict=True)
    )
