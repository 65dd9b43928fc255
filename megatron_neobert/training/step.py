"""One training step and one validation: forward, backward, update, and the sums that are logged.

The loss is summed and not averaged locally: ranks and micro-batches predict different numbers of tokens, so the
division happens once per iteration, inside Megatron, after all of them have been added (but for --loss-normalization
micro_batch, which is there to repeat the paper's code). Whether the update is made is decided between the backward
pass and the clipping of gradients, by numbers that all ranks hold alike (a skipped update costs its batch
and nothing else). Those numbers and what each rank has to report travel together: a step waits for the device once
(tests/gpu_path).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, fields
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_neobert.data.batches.stream import PackedBatch, StepBatches
from megatron_neobert.state import MetricSums, RankStatus, Run, StepResult
from megatron_neobert.training.optimizer import update_weights

_SUMS = len(fields(MetricSums))


def train_step(run: Run, batches: StepBatches) -> StepResult:
    """Forward and backward over this rank's micro-batches, then one update if it does no harm. Collective: all ranks.

    The learning rate changes without an update too: it is a function of the iteration.
    """
    reports, own_norm = compute_gradients(run, batches)
    sums, grad_norm, status = _over_all_ranks(run, _sum_up(reports, batches, run.device), own_norm)
    reason = skip_reason(sums.mean_loss, grad_norm)
    if reason is None:
        update_weights(run, grad_norm)
    run.scheduler.step(increment=1)
    return StepResult(sums, status, grad_norm=grad_norm, skip_reason=reason)


def skip_reason(loss: float, grad_norm: float) -> str | None:
    """Return why an update with this loss and gradient norm must not be made; None if it may."""
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    return None if is_finite else f"loss {loss:.4f}, gradient norm {grad_norm:.3f}"


def compute_gradients(run: Run, batches: StepBatches) -> tuple[list[Tensor], Tensor]:
    """Run forward and backward over this rank's micro-batches; return their reports and the gradient norm.

    The reports are those of `_report_loss`, none on a stage without the head. The norm is that over all ranks, before
    clipping, a scalar on the device. Collective: all ranks.
    """
    run.model.zero_grad_buffer()
    run.optimizer.zero_grad()
    reports = run_schedule(run, batches, _forward_step)
    run.optimizer.prepare_grads()  # finds nothing itself: only float16 has a loss scale
    return reports, run.optimizer.get_grad_norm()


@torch.no_grad()
def validation_step(run: Run, batches: StepBatches) -> StepResult:
    """Loss sums of one validation batch. Collective: all ranks."""
    reports = run_schedule(run, batches, _forward_step, forward_only=True)
    sums, _, status = _over_all_ranks(run, _sum_up(reports, batches, run.device))  # collective: all ranks
    return StepResult(sums, status)


def share_status(run: Run) -> RankStatus:
    """Return the statuses of all ranks without a training step. Collective: all ranks."""
    return _over_all_ranks(run, torch.zeros(_SUMS, dtype=torch.float64, device=run.device))[2]


def _over_all_ranks(run: Run, sums: Tensor, grad_norm: Tensor | None = None) -> tuple[MetricSums, float, RankStatus]:
    """Return the sums over the ranks, the gradient norm, and the largest status, the same bits on all ranks.

    What is not finite on one rank is so on all, and no rank finds a spike that another does not: megatron.core's norm
    is reduced by each replica for itself unless the optimizer is distributed, and equal only up to rounding.

    Collective: all ranks.
    """
    # From pinned memory, or the copy would wait for the device.
    status = torch.tensor(astuple(run.own_status()), dtype=torch.float64, pin_memory=run.device.type == "cuda")
    norm = torch.zeros_like(sums[:1]) if grad_norm is None else grad_norm.reshape(1)
    own = torch.cat([sums, norm, status.to(run.device, non_blocking=True)])
    ranks = torch.distributed.get_world_size()
    # Gathered and not reduced: of some the sum is wanted, of others the largest. 80 bytes per rank.
    gathered = torch.empty(ranks * len(own), dtype=own.dtype, device=own.device)
    torch.distributed.all_gather_into_tensor(gathered, own)
    columns = gathered.cpu().view(ranks, -1).T.tolist()  # the device is waited for here, and nowhere else in a step
    copies = parallel_state.get_tensor_model_parallel_world_size()  # of the same sums
    totals = MetricSums(*(sum(column) / copies for column in columns[:_SUMS]))
    largest = RankStatus(*(int(max(column)) for column in columns[_SUMS + 1 :]))
    return totals, sum(columns[_SUMS]) / ranks, largest


def run_schedule(
    run: Run,
    batches: StepBatches,
    forward_step: Callable[[Run, Iterator[PackedBatch], torch.nn.Module], tuple],
    *,
    forward_only: bool = False,
) -> list[Tensor]:
    """Run Megatron's schedule over this rank's micro-batches and return what is reported of them.

    Args:
        forward_step: Megatron's, with the run in front.

    Collective: all ranks.
    """
    return get_forward_backward_func()(
        forward_step_func=partial(forward_step, run),
        data_iterator=iter(batches.micro_batches),
        model=run.model,
        num_microbatches=len(batches.micro_batches),
        # To Megatron, a packed micro-batch is one sequence, of which a context-parallel rank has its share.
        seq_length=len(batches.micro_batches[0].tokens_t) * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _sum_up(reports: list[Tensor], batches: StepBatches, device: torch.device) -> Tensor:
    """Return this rank's part of the MetricSums of a step."""
    if not reports:  # a stage without the head
        return torch.zeros(_SUMS, dtype=torch.float64, device=device)
    # Filled on the device: a copy from here would wait for it.
    tokens = torch.full((1,), batches.real_tokens, dtype=torch.float64, device=device)
    of_micro_batches = torch.stack(reports).sum(0)
    return torch.cat([of_micro_batches[:3], tokens, of_micro_batches[3:]])


def _forward_step(run: Run, data: Iterator[PackedBatch], model: torch.nn.Module) -> tuple:
    run.tick()
    batch = next(data).to(run.device, non_blocking=True)
    output = model(batch.tokens_t, batch.cu_seqlens_n, batch.max_seqlen, batch.masked_positions_m, batch.labels_m)
    return output, partial(_report_loss, batch)


def _report_loss(batch: PackedBatch, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron's loss function: total loss, number of tokens it covers, and what is reported, all on the device."""
    total, tokens, sums = _sum_loss(batch.labels_m, output)
    pairs = batch.cu_seqlens_n.diff().double().square().sum(0, keepdim=True)
    # Context-parallel ranks hold the bounds of all documents, for a share of their tokens.
    return total, tokens, torch.cat([sums, pairs / parallel_state.get_context_parallel_world_size()])


def _sum_loss(labels_m: Tensor, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Total loss, number of tokens it covers, and one tensor of these two and the correct predictions."""
    losses_m, correct_m = output
    total = losses_m.sum()
    tokens = (labels_m >= 0).sum(dtype=torch.int)
    return total, tokens, torch.stack([total.detach(), tokens, correct_m.sum()]).double()
