"""What the training loop carries from one iteration to the next."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.rows import Cursor
from megatron_neobert.data.batches.stream import BatchStream
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:  # conversion reads Progress without megatron.core, whose import takes seconds
    from megatron_neobert.model.neobert import NeoBERTModel


@dataclass(frozen=True)
class Progress:
    """How far a run has come: with weights and optimizer state, all that resuming needs."""

    corpus_sha256: str  # of what `cursor` points into: a corpus, or a blend of several
    iteration: int = 0
    cursor: Cursor = field(default_factory=Cursor)  # the next unread row
    consumed_samples: int = 0  # rows
    consumed_tokens: int = 0  # tokens of documents; unused slots are not counted
    skipped_iterations: int = 0  # without an update, for a loss or a gradient that would have spoilt the weights
    skipped_in_a_row: int = 0  # of these, the last ones without a good one between
    recent_updates: tuple[tuple[float, float], ...] = ()  # loss and gradient norm, if --loss-spike-sigma needs them
    validated_iteration: int = 0  # of the last whole validation


@dataclass
class Run:
    """A run between two iterations. Only `progress` is replaced; the other parts change in place."""

    settings: Settings
    device: torch.device
    tokenizer: Tokenizer
    # This rank's pieces of the pipeline, usually one, each in megatron.core's DistributedDataParallel.
    models: list[Any]
    optimizer: Any  # megatron.core's MegatronOptimizer
    scheduler: Any  # megatron.core's OptimizerParamScheduler, counting iterations
    training_stream: BatchStream  # from the start of the corpus; the loop moves it to `progress.cursor`
    validation_stream: BatchStream | None
    progress: Progress
    # Called before each micro-batch: a watchdog's way to see that the run gets on.
    tick: Callable[[], None] = lambda: None

    @property
    def unwrapped_models(self) -> "list[NeoBERTModel]":
        """The models below the wrappers for data parallelism and bfloat16."""
        modules = [model.module for model in self.models]
        return [module.module for module in modules] if self.settings.training.bf16 else modules
