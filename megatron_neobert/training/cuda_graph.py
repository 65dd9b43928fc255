"""One CUDA graph for the forward and backward passes of an iteration.

Without a graph, the host launches every kernel itself. With Transformer Engine that takes it 116 ms per micro-batch of
28 layers, longer than the GPU computes for a few thousand tokens. A graph is launched as a whole. It includes all
micro-batches and the reduction of the gradients, but not the update of the weights.

A graph repeats kernels on fixed addresses, so each step copies its batch to the tensors that the graph reads. On a GPU
all steps of a phase have the same shapes (PackedBatch).
"""

from dataclasses import replace

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_neobert.data.batches.stream import PackedBatch, StepBatches
from megatron_neobert.state import Run
from megatron_neobert.training.step import run_schedule


class GraphedSchedule:
    """`run_schedule` with a graph. The run must be built and trained on a stream that is not CUDA's default stream.

    The first step with new shapes runs without a graph, because kernels are chosen and compiled in it. The second one
    is captured. An older graph is freed.
    """

    def __init__(self) -> None:
        self._shapes: list[tuple] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[PackedBatch] = []
        self._reports: list[Tensor] = []

    def __call__(self, run: Run, batches: StepBatches) -> list[Tensor]:
        """Run forward and backward, and return the reports of `run_schedule`, which the next call overwrites.

        Collective: all ranks.
        """
        shapes = [_shapes(batch) for batch in batches.micro_batches]
        if shapes != self._shapes:
            self.free()
            self._shapes = shapes
            return run_schedule(run, batches)
        if self._graph is None:
            self._inputs = [batch.to(run.device).clone() for batch in batches.micro_batches]
            self._graph = self._capture(run, replace(batches, micro_batches=self._inputs))
        run.tick()
        for ours, batch in zip(self._inputs, batches.micro_batches, strict=True):
            ours.copy_tensors_from(batch)
        self._graph.replay()
        return self._reports

    def free(self) -> None:
        """Free the graph with its memory. NCCL cannot destroy a group before the graphs with its collectives."""
        self._shapes, self._graph, self._inputs, self._reports = [], None, [], []

    def _capture(self, run: Run, batches: StepBatches) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Layers switch between these states of the random number generator even though they draw no number.
        for state in get_cuda_rng_tracker().get_states().values():
            graph.register_generator_state(state)
        # Other threads may allocate memory meanwhile: those of the loader and of a checkpoint that is being written.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._reports = run_schedule(run, batches)
        return graph


def _shapes(batch: PackedBatch) -> tuple:
    return batch.max_seqlen, batch.is_causal, *(tensor.shape for tensor in batch.tensors().values())
