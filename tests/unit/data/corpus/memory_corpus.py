"""A corpus in memory, its batches, and their content, for tests of code that reads batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_neobert.config.schema import DataConfig, Settings, TrainingConfig
from megatron_neobert.data.batches.batch import BatchStream, MicroBatch, RankBatches, RankPosition
from megatron_neobert.data.batches.masking import TokenIds
from megatron_neobert.data.batches.order import SplitPart
from megatron_neobert.data.batches.windows import BatchPhase, Source

VOCABULARY = 1000
UNKNOWN = 4
IDS = TokenIds(vocab_size=VOCABULARY, cls=1, sep=2, pad=0, mask=3, special=(0, 1, 2, 3, UNKNOWN))
PAPER = {"mask_prob": 0.2, "mask_replacement": "all_mask"}
BERT = {"mask_prob": 0.15, "mask_replacement": "bert"}


class MemoryCorpus:
    """Documents with random ids, some of them [UNK]; stands for a `Corpus`."""

    is_remote = False

    def __init__(self, lengths: Sequence[int] | NDArray[np.int64], *, seed: int = 0) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int32)
        self.ends = np.cumsum(self.lengths, dtype=np.int64)
        generator = np.random.default_rng(seed)
        self.ids = generator.integers(UNKNOWN, VOCABULARY, int(self.lengths.sum()), dtype=np.uint16)
        self.prefetched: list[NDArray[np.int64]] = []

    def document(self, number: int) -> NDArray[np.uint16]:
        end = self.ends[number]
        return self.ids[end - self.lengths[number] : end]

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int32]:
        return self.lengths[documents]

    def prefetch(self, documents: NDArray[np.int64]) -> None:
        self.prefetched.append(documents)

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.uint16]:
        segments = zip(documents, starts, lengths, strict=True)
        return np.concatenate([self.document(document)[start : start + length] for document, start, length in segments])


def bits_of(is_chosen: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return one bit per document in whole blocks of 256, as `choose_documents` does."""
    return np.packbits(np.append(is_chosen, np.zeros(-len(is_chosen) % 256, dtype=np.bool_)), bitorder="little")


def web_like_lengths(documents: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return log-normal document lengths with the median of 368 and the mean of 640 tokens of RefinedWeb."""
    sigma = np.sqrt(2 * np.log(640 / 368))
    return np.maximum(1, np.random.default_rng(seed).lognormal(np.log(368), sigma, documents)).astype(np.int64)


def batch_settings(*, micro_batch_size: int = 2, global_batch_size: int = 8, **data: Any) -> Settings:
    training = TrainingConfig(micro_batch_size=micro_batch_size, global_batch_size=global_batch_size, seed=1234)
    return Settings(data=DataConfig(**{"seq_length": 64, **PAPER, **data}), training=training)


def whole(corpus: MemoryCorpus, weight: int = 1) -> Source:
    """Return a source with all documents of a corpus."""
    return Source(corpus, SplitPart((len(corpus.lengths),), 0), weight)


def stream_of(corpus: MemoryCorpus, **settings: Any) -> BatchStream:
    """Return the batches of all documents of a corpus, for one rank, from the beginning."""
    return stream_over((whole(corpus),), **settings)


def stream_over(sources: tuple[Source, ...], **settings: Any) -> BatchStream:
    return BatchStream((BatchPhase(sources, batch_settings(**settings), IDS),))


def ranks_of(stream: BatchStream, size: int) -> list[BatchStream]:
    """Return the stream of each of several data-parallel ranks."""
    return [
        replace(stream, rank=RankPosition(data_parallel_rank=rank, data_parallel_size=size)) for rank in range(size)
    ]


def micro_batches(stream: BatchStream, steps: int) -> Iterator[MicroBatch]:
    for step in islice(stream.rank_batches(), steps):
        yield from step.micro_batches


def first_epoch(corpus: MemoryCorpus, **settings: Any) -> Iterator[MicroBatch]:
    """Yield the packed sequences of the first epoch, one per micro-batch."""
    for step in stream_of(corpus, micro_batch_size=1, global_batch_size=1, **settings).rank_batches():
        yield from step.micro_batches
        if step.cursor_after.epoch:
            return


def original_ids(batch: MicroBatch) -> list[int]:
    """Return the ids of a batch before masking, without padding."""
    original = batch.tokens_t.clone()
    original[batch.masked_positions_m] = batch.labels_m
    return original[: batch.real_tokens].tolist()


def contents(steps: Iterable[RankBatches]) -> list[Any]:
    """Return everything that a rank trains on, and the cursor after each step, as values that can be compared."""
    return [(step.cursor_after, [_plain(batch) for batch in step.micro_batches]) for step in steps]


def _plain(batch: MicroBatch) -> list[Any]:
    return [
        (value.dtype, value.device.type, value.tolist()) if isinstance(value, torch.Tensor) else value
        for value in vars(batch).values()
    ]
