"""One CUDA graph for the forward and backward passes of an iteration.

Without a graph, the host launches every kernel itself. With Transformer Engine that takes it 116 ms per micro-batch of
28 layers, longer than the GPU computes for a few thousand tokens. A graph is launched as a whole. It includes all
micro-batches and the reduction of the gradients, but not the update of the weights.

A graph repeats kernels on fixed addresses, so each step copies its micro-batches to the tensors that the graph reads. A
replay runs no Python, so state that libraries keep in Python does not change (docs/architecture.md, "The CUDA graph").
"""

from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_neobert.data.batches.batch import MicroBatch, RankBatches
from megatron_neobert.state import Run
from megatron_neobert.training.step import run_schedule


class GraphedSchedule:
    """`run_schedule` as a CUDA graph. The run must be built and trained on a stream other than CUDA's default stream.

    The first step with new shapes runs without a graph, because kernels are chosen and compiled in this step. The
    second step is captured. Within a phase, only the number of documents changes between steps. This number is padded
    to the largest so far, so the graph is captured again a few times at the start of a phase.
    """

    def __init__(self) -> None:
        self._inputs: list[MicroBatch] = []
        self._reports: list[Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_warm = False

    def __call__(self, run: Run, batches: RankBatches) -> list[Tensor]:
        """Run forward and backward, and return the reports of `run_schedule`, which the next call overwrites.

        Collective: all ranks.
        """
        shapes = [_shapes(batch) for batch in batches.micro_batches]
        if shapes != [_shapes(target) for target in self._inputs] or any(
            len(batch.cu_seqlens_n) > len(target.cu_seqlens_n)
            for batch, target in zip(batches.micro_batches, self._inputs, strict=True)
        ):
            self.free()
            bounds = max(len(batch.cu_seqlens_n) for batch in batches.micro_batches)
            for batch in batches.micro_batches:
                empty = batch.map_tensors(lambda tensor: torch.empty_like(tensor, device=run.device))
                self._inputs.append(replace(empty, cu_seqlens_n=empty.cu_seqlens_n.new_empty(bounds)))
        for target, batch in zip(self._inputs, batches.micro_batches, strict=True):
            copy_batch(batch, target)
        inputs = replace(batches, micro_batches=self._inputs)
        if not self._is_warm:
            self._is_warm = True
            return run_schedule(run, inputs)
        if self._graph is None:
            mark_weights_as_updated(run)
            self._graph = self._capture(run, inputs)
        run.tick()
        self._graph.replay()
        mark_weights_as_updated(run)
        return self._reports

    def free(self) -> None:
        """Free the graph and its memory. NCCL cannot destroy a group while a graph holds its collectives."""
        self._inputs, self._reports, self._graph, self._is_warm = [], [], None, False

    def _capture(self, run: Run, inputs: RankBatches) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Layers switch between these states of the random number generator although they draw no number.
        for state in get_cuda_rng_tracker().get_states().values():
            graph.register_generator_state(state)
        # Threads of the loader and of a background save may allocate memory during the capture.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self._reports = run_schedule(run, inputs)
        return graph


def mark_weights_as_updated(run: Run) -> None:
    """Make the next forward pass gather the weights of other ranks, if gathering overlaps with computing.

    Megatron gathers a bucket's weights unless `param_gather_dispatched` is set. Each forward pass sets this flag, and
    the end of a backward pass clears the flag, but a graph's replay does neither. With a wrong flag, a graph captured
    after a validation contains no gather, and a validation after a replay uses outdated weights of other ranks.
    """
    for group in run.model.bucket_groups:
        group.param_gather_dispatched = False


def _shapes(batch: MicroBatch) -> tuple:
    """Return the sizes and the kind of attention of a batch, which must be equal in all steps of a graph."""
    return batch.max_seqlen, batch.is_causal, len(batch.tokens_t), len(batch.labels_m)


def copy_batch(batch: MicroBatch, target: MicroBatch) -> None:
    """Copy a micro-batch's tensors into `target`. Extra documents in `target` become empty documents at the end."""
    for name in ("tokens_t", "labels_m", "masked_positions_m"):
        getattr(target, name).copy_(getattr(batch, name), non_blocking=True)
    bounds = len(batch.cu_seqlens_n)
    target.cu_seqlens_n[:bounds].copy_(batch.cu_seqlens_n, non_blocking=True)
    target.cu_seqlens_n[bounds:] = len(batch.tokens_t) * parallel_state.get_context_parallel_world_size()
