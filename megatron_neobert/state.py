"""Types that the training loop carries from one iteration to the next."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.phases import TrainingStream
from megatron_neobert.data.batches.stream import BatchStream
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:  # conversion reads TrainState without megatron.core, whose import takes seconds
    from megatron_neobert.model.neobert import NeoBERTModel


@dataclass(frozen=True)
class TrainState:
    """Progress of a run. With weights and optimizer state, resuming needs nothing else."""

    corpus_sha256: str  # of the corpus, or blend of corpora, that `cursor` points into; that of the last iteration
    iteration: int = 0
    cursor: Cursor = field(default_factory=Cursor)  # the next unread row
    consumed_samples: int = 0  # rows
    consumed_tokens: int = 0  # tokens of documents; unused capacity is not counted
    skipped_iterations: int = 0  # without an update, because its loss or gradient was not finite
    skipped_in_a_row: int = 0  # skipped iterations since the last update
    validated_iteration: int = 0  # of the last complete validation


@dataclass(frozen=True)
class MetricSums:
    """Sums over the tokens of one or more steps and over all ranks."""

    loss: float = 0.0  # nats, over the masked tokens
    masked_tokens: float = 0.0
    correct: float = 0.0  # masked tokens whose likeliest prediction is right
    tokens: float = 0.0  # of documents
    # Pairs of tokens that attend to each other (the sum of squared lengths, dummy documents included).
    attended_pairs: float = 0.0

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_loss(self) -> float:
        """Nats per masked token."""
        return self.loss / max(self.masked_tokens, 1)

    @property
    def accuracy(self) -> float:
        """Share of the masked tokens whose likeliest prediction is right."""
        return self.correct / max(self.masked_tokens, 1)


@dataclass(frozen=True)
class RankStatus:
    """Facts that one rank alone has, as whole numbers; the largest value over all ranks decides."""

    stop_code: int = 0  # of runtime/signals.py
    is_saving: int = 0  # the rank still writes its part of a checkpoint
    memory_mib: int = 0


@dataclass(frozen=True)
class StepResult:
    """Outcome of a training or validation step, the same on all ranks."""

    sums: MetricSums
    status: RankStatus = RankStatus()
    grad_norm: float = 0.0  # over all ranks, before clipping
    skip_reason: str | None = None  # why there was no update


@dataclass(frozen=True)
class LoopControl:
    """Actions that follow an iteration, the same on all ranks."""

    stop: str | None = None  # why the run stops before its last iteration
    failure: str | None = None  # why the run ends as broken
    is_last: bool = False
    validates: bool = False
    saves: bool = False
    logs: bool = False

    @property
    def ends(self) -> bool:
        return self.is_last or self.stop is not None or self.failure is not None


@dataclass
class Run:
    """A run between two iterations. `state` and `own_status` are replaced; the other parts change in place."""

    settings: Settings
    device: torch.device
    tokenizer: Tokenizer
    model: Any  # this rank's pipeline stage, in megatron.core's DistributedDataParallel
    optimizer: Any  # megatron.core's MegatronOptimizer
    scheduler: Any  # megatron.core's OptimizerParamScheduler, counting iterations
    training_stream: TrainingStream  # from the start of the corpus; the loop moves it to `state`
    validation_streams: dict[str, BatchStream]  # by the name of the curve
    state: TrainState
    # Called before each micro-batch, so that the hang detector sees progress.
    tick: Callable[[], None] = lambda: None
    own_status: Callable[[], RankStatus] = RankStatus  # asked once per step

    @property
    def unwrapped_model(self) -> "NeoBERTModel":
        """Model inside the wrappers for data parallelism and bfloat16."""
        module = self.model.module
        return module.module if self.settings.training.bf16 else module
