"""Rebuild the global batch of an iteration of a run, with the code that builds it in training.

The settings that trained on a batch are in the first checkpoint after it. Tensors of checkpoints are not read. Without
a checkpoint before the batch, all earlier packed sequences are packed again. This reads only lengths, about 2 M
documents per second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints
from megatron_neobert.checkpoint.train_state import read_train_state
from megatron_neobert.config.cli import parse_command_line, read_record
from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig, Settings
from megatron_neobert.data.batches.batch import GlobalBatch, RankPosition, build_stream
from megatron_neobert.data.batches.corpora import OpenedCorpora
from megatron_neobert.data.batches.windows import IGNORED_LABEL
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError

# The global batch does not depend on the layout, and the commands run in a single process.
_ONE_RANK = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"]


@dataclass(frozen=True)
class Segment:
    """A document, or a range of a document's tokens, in a packed sequence, with [CLS] and [SEP]."""

    sequence: int  # number of the packed sequence in the global batch, from 0
    corpus: str
    document: int
    epoch: int
    first_token: int  # index in the document
    text_tokens: int  # without [CLS] and [SEP]
    document_tokens: int
    input_ids_s: NDArray[np.int64]
    labels_s: NDArray[np.int64]  # IGNORED_LABEL where nothing is predicted


def open_iteration(load: Path | None, iteration: int, flags: list[str]) -> tuple[Settings, Path | None]:
    """Return the settings that rebuild an iteration on one rank without outputs, and the checkpoint to start from.

    The checkpoint is the newest before the iteration, or None to start at iteration 1.

    Args:
        load: Folder of a run, or None. The run's settings apply unless `flags` contains --config.
        flags: Flags of `neobert train`, which override the run's settings.

    Raises:
        CheckpointError: The run's saved settings are damaged.
        ConfigError: A flag is unknown, the settings break a rule, or the iteration is after the run's last iteration.
        MissingInputError: `load` contains no checkpoint to read settings from, or the run began with --continue-from
            and no checkpoint precedes the iteration.
    """
    checkpoints, record = [] if load is None else list_checkpoints(load), None
    if load is not None and not any(flag.partition("=")[0] == "--config" for flag in flags):
        later = [folder for folder in checkpoints if iteration_of(folder) >= iteration]
        record = (later[-1] if later else latest_checkpoint(load)) / "settings.yaml"
        read_record(record)  # raises CheckpointError
    settings = parse_command_line([*flags, *_ONE_RANK], world_size=1, record=record).settings
    if iteration > (last := settings.training.train_iters):
        raise ConfigError(
            f"--iteration {iteration} is after the last iteration of this run, {last} (--train-iters). Name an earlier "
            "iteration, or raise --train-iters."
        )
    checkpoint = next((folder for folder in checkpoints if iteration_of(folder) < iteration), None)
    if checkpoint is None and settings.checkpoint.continue_from is not None:
        missing = "there is no --load" if load is None else f"--load {load} has no checkpoint before it"
        raise MissingInputError(
            f"iteration {iteration} cannot be rebuilt: {missing}, and the data of a run with --continue-from do not "
            "begin at iteration 1. Name the folder of the run, and an iteration after its first checkpoint."
        )
    return replace(settings, checkpoint=CheckpointConfig(), logging=LoggingConfig()), checkpoint


def rebuild_batch(
    settings: Settings, opened: Sequence[OpenedCorpora], iteration: int, *, checkpoint: Path | None
) -> GlobalBatch:
    """Build the global batch of an iteration (1-based), without a model.

    `opened` is the data of each phase. `checkpoint` is a checkpoint of the run before the iteration, or None to start
    at iteration 1. Raise CheckpointError if the checkpoint is damaged, or was trained on a different corpus.
    """
    stream = build_stream(settings, opened)
    if checkpoint is not None:
        saved = read_train_state(checkpoint).state
        if saved.corpus_sha256 != (sha256 := stream.phase_at(saved.iteration).corpus_sha256):
            raise CheckpointError(
                f"{checkpoint} was trained on the corpus with sha256 {saved.corpus_sha256[:12]}, --data-path names a "
                f"corpus with {sha256[:12]}. Name the corpus that the checkpoint was trained on."
            )
        stream = replace(stream, iteration=saved.iteration, cursor=saved.cursor)
    return stream.global_batch(iteration)


def read_segments(batch: GlobalBatch) -> Iterator[Segment]:
    """Yield all segments of a global batch in order, with their tokens and labels."""
    size = batch.phase.settings.training.micro_batch_size
    for number, micro_batch in enumerate(batch.for_rank(RankPosition()).micro_batches):
        packed = batch.packed.take(number * size, (number + 1) * size)
        tokens_t = micro_batch.tokens_t.numpy()
        labels_t = np.full(len(tokens_t), IGNORED_LABEL)
        if not micro_batch.is_causal:  # otherwise all tokens are inputs as they are
            labels_t[micro_batch.masked_positions_m.numpy()] = micro_batch.labels_m.numpy()
        columns, bounds = packed.segments, np.append(0, np.cumsum(packed.segments.packed_lengths_n))
        sequences_n = number * size + np.repeat(np.arange(len(packed)), np.diff(packed.offsets))
        for index, (start, end) in enumerate(pairwise(bounds.tolist())):
            corpus = batch.phase.sources[int(columns.components_n[index])].corpus
            document = int(columns.numbers_n[index])
            yield Segment(
                sequence=int(sequences_n[index]),
                corpus=str(corpus.prefix),
                document=document,
                epoch=int(columns.epochs_n[index]),
                first_token=int(columns.starts_n[index]),
                text_tokens=int(columns.lengths_n[index]),
                document_tokens=int(corpus.lengths_of(np.array([document]))[0]),
                input_ids_s=tokens_t[start:end],
                labels_s=labels_t[start:end],
            )
