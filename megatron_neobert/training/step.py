"""A training step and a validation step: forward, backward, update, and the sums that are logged.

Ranks and micro-batches predict different numbers of tokens. So they sum their losses, and Megatron divides once per
iteration by all predicted tokens. (`--loss-normalization micro_batch`, which repeats the paper's code, divides in each
micro-batch.)

After backward, all ranks exchange loss, gradient norm and status in one collective. This is the only time in a step
that the host waits for the device (tests/gpu_path). The ranks then skip the update if loss or gradient norm is not
finite, or if no token was predicted; a skipped update changes no weight and no optimizer state.
"""

import math
from collections.abc import Iterator
from dataclasses import astuple, fields, replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_neobert.data.batches.batch import MicroBatch, RankBatches
from megatron_neobert.state import MetricSums, RankStatus, Run, StepResult
from megatron_neobert.training.optimizer import update_weights

_SUMS = len(fields(MetricSums))


def train_step(run: Run, batches: RankBatches) -> StepResult:
    """Train on a global batch: forward, backward, and update, unless the update is skipped. Collective: all ranks.

    The scheduler steps even if the update is skipped. `run.state` does not change.
    """
    reports, local_norm = compute_gradients(run, batches)
    result = _gather_results(run, reports, batches.real_tokens, local_norm)
    reason = skip_reason(result.sums, result.grad_norm)
    if reason is None:
        update_weights(run, result.grad_norm)
    # The learning rate is a function of the iteration, so it changes after a skipped update, too.
    run.scheduler.step(increment=1)
    return replace(result, skip_reason=reason)


def skip_reason(sums: MetricSums, grad_norm: float) -> str | None:
    """Return the reason to skip an update (loss or norm not finite, or no predicted token), or None to update."""
    if sums.masked_tokens == 0:  # all gradients are zero, and an update would decay weights and moments
        return "the batch has no predicted token"
    is_finite = math.isfinite(sums.mean_loss) and math.isfinite(grad_norm)
    return None if is_finite else f"loss {sums.mean_loss:.4f}, gradient norm {grad_norm:.3f}"


def compute_gradients(run: Run, batches: RankBatches) -> tuple[list[Tensor], Tensor]:
    """Run forward and backward over this rank's micro-batches, from zero gradients. Collective: all ranks.

    Return the result of `run_schedule`, and the gradient norm before clipping, a scalar on the device.
    """
    run.model.zero_grad_buffer()
    run.optimizer.zero_grad()
    reports = (run.graph or run_schedule)(run, batches)
    # Megatron checks for infinities here only with float16, which is not used.
    run.optimizer.prepare_grads()
    return reports, run.optimizer.get_grad_norm()


@torch.no_grad()
def validation_step(run: Run, batches: RankBatches) -> StepResult:
    """Run the forward pass on a validation batch, and return the sums over all ranks. Collective: all ranks."""
    reports = run_schedule(run, batches, forward_only=True)
    return _gather_results(run, reports, batches.real_tokens)


def share_status(run: Run) -> RankStatus:
    """Return the largest value of each status field over all ranks. Collective: all ranks."""
    return _gather_results(run, [], 0).status


def _gather_results(run: Run, reports: list[Tensor], real_tokens: int, grad_norm: Tensor | None = None) -> StepResult:
    """Return the sums over all ranks, the mean gradient norm, and the largest status, bit-identical on all ranks.

    The result also contains each rank's computing time. `run.read_status` returns this rank's status. Norms are
    averaged because, without the distributed optimizer, each replica computes its norm, and norms differ by rounding.

    Args:
        reports: Result of `run_schedule`.
        grad_norm: Gradient norm that this rank computed, a scalar on the device; None for 0.

    Collective: all ranks.
    """
    # Filled on the device, because a copy from the host would wait for the device.
    sums = torch.zeros(_SUMS, dtype=torch.float64, device=run.device)  # MetricSums, in the order of the fields
    if reports:
        total = torch.stack(reports).sum(0)
        tokens = torch.full((1,), real_tokens, dtype=torch.float64, device=run.device)
        sums = torch.cat([total[:3], tokens, total[3:]])
    # Pinned memory, because a copy from pageable memory waits for the device.
    status = torch.tensor(astuple(run.read_status()), dtype=torch.float64, pin_memory=run.device.type == "cuda")
    norm = torch.zeros_like(sums[:1]) if grad_norm is None else grad_norm.reshape(1)
    local = torch.cat([sums, norm, status.to(run.device, non_blocking=True)])
    ranks = torch.distributed.get_world_size()
    # Gathered instead of reduced, because sums, mean and maximum are needed. 80 bytes per rank.
    gathered = torch.empty(ranks * len(local), dtype=local.dtype, device=local.device)
    torch.distributed.all_gather_into_tensor(gathered, local)
    # The only place in a step where the host waits for the device.
    columns = gathered.cpu().view(ranks, -1).T.tolist()
    # Tensor-parallel ranks have the same sums.
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    totals = MetricSums(*(sum(column) / tensor_parallel_size for column in columns[:_SUMS]))
    largest = RankStatus(*(int(max(column)) for column in columns[_SUMS + 1 :]))
    compute_us = tuple(map(int, columns[-1]))  # the last field of RankStatus
    return StepResult(totals, largest, grad_norm=sum(columns[_SUMS]) / ranks, compute_us=compute_us)


def run_schedule(run: Run, batches: RankBatches, *, forward_only: bool = False) -> list[Tensor]:
    """Run Megatron's schedule over this rank's micro-batches: forward, and backward unless `forward_only`.

    Return the report of `_compute_loss` for each micro-batch; on a pipeline stage without the head, an empty list.
    Collective: all ranks.
    """
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, run),
        data_iterator=iter(batches.micro_batches),
        model=run.model,
        num_microbatches=len(batches.micro_batches),
        # For Megatron, a micro-batch is one sequence, of which each context-parallel rank has an equal slice.
        seq_length=len(batches.micro_batches[0].tokens_t) * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _forward_step(run: Run, data: Iterator[MicroBatch], model: torch.nn.Module) -> tuple:
    run.tick()
    batch = next(data).to(run.device, non_blocking=True)
    predicted = batch.masked_positions_m, batch.labels_m
    output = model(batch.tokens_t, batch.cu_seqlens_n, batch.max_seqlen, *predicted, is_causal=batch.is_causal)
    return output, partial(_compute_loss, batch)


def _compute_loss(batch: MicroBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of a micro-batch, as Megatron's loss function.

    Returns:
        Total loss in nats, number of predicted tokens, and the report, all on the device. The report is fp64, [4]:
        loss, predicted tokens, correct predictions and attended pairs.
    """
    losses_m, correct_m = output
    total = losses_m.sum()
    tokens = (batch.labels_m >= 0).sum(dtype=torch.int)
    sums = torch.stack([total.detach(), tokens, correct_m.sum()]).double()
    pairs = batch.cu_seqlens_n.diff().double().square().sum(0, keepdim=True)
    # Every context-parallel rank has the bounds of all documents, so each one reports an equal share of the pairs.
    return total, tokens, torch.cat([sums, pairs / parallel_state.get_context_parallel_world_size()])
