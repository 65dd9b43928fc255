"""One training step and one validation: forward, backward, update, and the sums that are logged.

The loss is summed and not averaged locally: ranks and micro-batches predict different numbers of tokens, so the
division happens once per iteration, inside Megatron, after all of them have been added (but for --loss-normalization
micro_batch, which is there to repeat the paper's code).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_neobert.data.batches import PackedBatch, StepBatches
from megatron_neobert.training.run import Run


@dataclass(frozen=True)
class StepReport:
    """What this rank alone knows of a step; sums, so that reports of ranks and steps add up."""

    sums: Tensor  # fp64 on the device: loss in nats, masked tokens, correct predictions, tokens of documents
    grad_norm: float = 0.0  # over all ranks, before clipping


def train_step(run: Run, batches: StepBatches) -> StepReport:
    """Forward and backward over this rank's micro-batches, then one update. Collective: all ranks."""
    for model in run.models:
        model.zero_grad_buffer()
    run.optimizer.zero_grad()
    sums = _forward_backward(run, batches, forward_only=False)
    _, grad_norm, _ = run.optimizer.step()
    run.scheduler.step(increment=1)
    return StepReport(sums, grad_norm=float(grad_norm or 0.0))


@torch.no_grad()
def validation_step(run: Run, batches: StepBatches) -> StepReport:
    """Loss sums of one validation batch. Collective: all ranks."""
    return StepReport(_forward_backward(run, batches, forward_only=True))


def _forward_backward(run: Run, batches: StepBatches, *, forward_only: bool) -> Tensor:
    iterators = [iter(batches.micro_batches) for _ in run.models]
    reports = get_forward_backward_func()(
        forward_step_func=lambda data, model: _forward_step(data, model, run.device),
        # Every piece of the pipeline reads all micro-batches.
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=run.models if len(run.models) > 1 else run.models[0],
        num_microbatches=len(batches.micro_batches),
        # To Megatron, a packed micro-batch is one row.
        seq_length=run.settings.slots_per_micro_batch,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    if not reports:  # a stage without the head
        return torch.zeros(4, dtype=torch.float64, device=run.device)
    # Filled on the device: a copy from here would wait for it.
    tokens = torch.full((1,), batches.real_tokens, dtype=torch.float64, device=run.device)
    return torch.cat([torch.stack(reports).sum(0), tokens])


def _forward_step(data: Iterator[PackedBatch], model: torch.nn.Module, device: torch.device) -> tuple:
    batch = next(data).to(device, non_blocking=True)
    output = model(batch.tokens_t, batch.cu_seqlens_n, batch.max_seqlen, batch.masked_positions_m, batch.labels_m)
    return output, partial(_sum_loss, batch.labels_m)


def _sum_loss(labels_m: Tensor, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron's loss function: total loss, number of tokens it covers, and what is reported."""
    losses_m, correct_m = output
    total = losses_m.sum()
    tokens = (labels_m >= 0).sum(dtype=torch.int)
    return total, tokens, torch.stack([total.detach(), tokens, correct_m.sum()]).double()
