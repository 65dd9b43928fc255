"""Two ranks over NCCL give the losses of one rank. On one GPU, each rank is a node whose network is loopback."""

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import read_metrics
from tests_tiny import tiny_settings
from training_command import BASH, environment, flags_of, free_port

from megatron_neobert.config.schema import Settings

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_gpu]
STEPS = 20
LOSS = 2e-3  # on an H200: 5e-4 in FP8, 9e-5 otherwise; with half of the documents, 0.1
LOCAL = {"transformer_impl": "local"}
ENGINE = {"transformer_impl": "transformer_engine"}
GRAPH = {"cuda_graph_impl": "full_iteration"}
TP2, PP2, CP2 = ({f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context"))
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "data 2": {"compute": LOCAL},
    "data 2, overlapped, graph": {
        "compute": ENGINE | GRAPH, "parallel": {"overlap_grad_reduce": True, "ddp_bucket_size": 100_000}
    },
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


def run_of(corpus: Any, save: Path, **sections: dict[str, Any]) -> Settings:
    settings = tiny_settings(corpus, save=save, model={"num_layers": 4, "hidden_size": 256}, **sections)
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
