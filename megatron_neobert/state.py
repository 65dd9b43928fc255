"""Types that the training loop carries from one iteration to the next."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from megatron_neobert.checkpoint.train_state import TrainState
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.batch import BatchStream
from megatron_neobert.data.batches.corpora import OpenedCorpora
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.model.neobert import NeoBERTModel


@dataclass(frozen=True)
class MetricSums:
    """Sums over the tokens of one or more steps on all ranks."""

    loss: float = 0.0  # nats, summed over the masked tokens
    masked_tokens: float = 0.0
    correct: float = 0.0  # masked tokens whose likeliest prediction is right
    tokens: float = 0.0  # document tokens
    # Pairs of tokens that attend to each other: the sum of squared document lengths, padding documents included.
    attended_pairs: float = 0.0

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def mean_loss(self) -> float:
        """Mean loss in nats per masked token; 0.0 without masked tokens."""
        return self.loss / max(self.masked_tokens, 1)

    @property
    def accuracy(self) -> float:
        """Share of the masked tokens whose likeliest prediction is right, from 0 to 1."""
        return self.correct / max(self.masked_tokens, 1)


@dataclass(frozen=True)
class RankStatus:
    """Facts that only one rank can observe. Ranks share the largest value of each field."""

    stop_code: int = 0  # of `requested_stop` in runtime/signals.py
    is_saving: int = 0  # 1 while the rank writes its part of a checkpoint
    memory_mib: int = 0
    compute_us: int = 0  # microseconds of the previous step, see Monitor.stop_clock


@dataclass(frozen=True)
class StepResult:
    """Result of a training or validation step, the same on all ranks."""

    sums: MetricSums
    status: RankStatus = RankStatus()
    grad_norm: float = 0.0  # over all ranks, before clipping
    compute_us: tuple[int, ...] = ()  # of each rank, as in RankStatus
    skip_reason: str | None = None  # reason why the update was skipped


@dataclass(frozen=True)
class LoopControl:
    """Decisions after an iteration, the same on all ranks."""

    stop: str | None = None  # reason why the run stops before its last iteration
    failure: str | None = None  # reason why the run ends with an error
    is_last: bool = False
    validates: bool = False
    saves: bool = False
    logs: bool = False

    @property
    def ends(self) -> bool:
        """True if the run ends after this iteration."""
        return self.is_last or self.stop is not None or self.failure is not None


@dataclass
class Run:
    """State of training on this rank. The loop replaces `state` and the callbacks; other objects change in place."""

    settings: Settings
    device: torch.device
    opened: Sequence[OpenedCorpora]  # corpora of each phase
    model: Any  # this rank's pipeline stage, in megatron.core's DistributedDataParallel
    optimizer: Any  # megatron.core's MegatronOptimizer
    scheduler: Any  # megatron.core's OptimizerParamScheduler, counting iterations
    training_stream: BatchStream  # starts at the first packed sequence; the loop continues at `state.cursor`
    validation_streams: dict[str, BatchStream]  # name of the curve -> batches
    state: TrainState
    graph: Any = None  # GraphedSchedule of training/cuda_graph.py, or None without a CUDA graph
    tick: Callable[[], None] = lambda: None  # called before each micro-batch, to report progress to the watcher
    has_gradients: Callable[[], None] = lambda: None  # called when this rank has its gradients, before they are reduced
    read_status: Callable[[], RankStatus] = RankStatus  # called once per step, returns the status of this rank

    @property
    def tokenizer(self) -> Tokenizer:
        return self.opened[0].tokenizer

    @property
    def unwrapped_model(self) -> NeoBERTModel:
        """The model inside the wrappers for data parallelism and bfloat16."""
        module = self.model.module
        return module.module if self.settings.training.bf16 else module
