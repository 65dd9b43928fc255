"""What the training loop carries from one iteration to the next."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.phases import TrainingStream
from megatron_neobert.data.batches.rows import Cursor
from megatron_neobert.data.batches.stream import BatchStream
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:  # conversion reads Progress without megatron.core, whose import takes seconds
    from megatron_neobert.model.neobert import NeoBERTModel


@dataclass(frozen=True)
class Progress:
    """How far a run has come: with weights and optimizer state, all that resuming needs."""

    corpus_sha256: str  # of what `cursor` points into: a corpus, or a blend of several; that of the last iteration
    iteration: int = 0
    cursor: Cursor = field(default_factory=Cursor)  # the next unread row
    consumed_samples: int = 0  # rows
    consumed_tokens: int = 0  # tokens of documents; unused capacity is not counted
    skipped_iterations: int = 0  # without an update, for a loss or a gradient that would have broken the weights
    skipped_in_a_row: int = 0  # of these, the last ones without a good one between
    recent_updates: tuple[tuple[float, float], ...] = ()  # loss and gradient norm, if --loss-spike-sigma needs them
    validated_iteration: int = 0  # of the last whole validation


@dataclass(frozen=True)
class RankStatus:
    """What a rank knows alone, in whole numbers; of each, the largest over all ranks decides."""

    stop_code: int = 0  # of runtime/signals.py
    save_is_wanted: int = 0
    is_saving: int = 0  # it still writes its part of a checkpoint
    memory_mib: int = 0


@dataclass(frozen=True)
class StepReport:
    """What is known of a step, the same on all ranks."""

    # Loss in nats, masked tokens, correct predictions, tokens of documents, and pairs of tokens that see each other
    # (the sum of squared lengths, dummy documents included), which attention costs; sums, so that steps add up.
    sums: tuple[float, ...]
    status: RankStatus = RankStatus()
    loss: float = 0.0  # nats per masked token; 0 without one
    grad_norm: float = 0.0  # over all ranks, before clipping
    skip_reason: str | None = None  # why there was no update


@dataclass
class Run:
    """A run between two iterations. `progress` and `own_status` are replaced; the other parts change in place."""

    settings: Settings
    device: torch.device
    tokenizer: Tokenizer
    model: Any  # this rank's pipeline stage, in megatron.core's DistributedDataParallel
    optimizer: Any  # megatron.core's MegatronOptimizer
    scheduler: Any  # megatron.core's OptimizerParamScheduler, counting iterations
    training_stream: TrainingStream  # from the start of the corpus; the loop moves it to `progress`
    validation_streams: dict[str, BatchStream]  # by the name of the curve
    progress: Progress
    # Called before each micro-batch: how the hang detector sees that the run makes progress.
    tick: Callable[[], None] = lambda: None
    own_status: Callable[[], RankStatus] = RankStatus  # asked once per step

    @property
    def unwrapped_model(self) -> "NeoBERTModel":
        """The model inside the wrappers for data parallelism and bfloat16."""
        module = self.model.module
        return module.module if self.settings.training.bf16 else module
