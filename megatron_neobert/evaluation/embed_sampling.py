"""Batches of pairs: one dataset per batch, drawn with p ~ size^alpha, and no text twice in it.

The order is a function of the seed alone, so that a resumed run finds the batches it would have had. Within a dataset
it is that of sentence-transformers' NoDuplicatesBatchSampler, which reads the rows in passes over a random order and
lets a row that shares a text with the batch wait for the next one.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler, NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from torch.utils.data import BatchSampler, ConcatDataset

from megatron_neobert.errors import DataError


@dataclass(frozen=True)
class SamplingPlan:
    """The drawing of batches; datasets in the order of the DatasetDict."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # rows
    batch_sizes: tuple[int, ...]  # pairs
    alpha: float
    batches: int
    seed: int

    def draw_datasets(self) -> np.ndarray:
        """Return the number of the dataset of each batch."""
        weights = np.asarray(self.sizes, dtype=np.float64) ** self.alpha
        generator = np.random.default_rng([self.seed, 0])
        return generator.choice(len(self.sizes), size=self.batches, p=weights / weights.sum())

    def describe(self) -> dict[str, dict[str, int]]:
        """Return rows, pairs per batch and number of batches of every dataset."""
        drawn = np.bincount(self.draw_datasets(), minlength=len(self.sizes)).tolist()
        return {
            name: {"rows": rows, "pairs_per_batch": pairs, "batches": batches}
            for name, rows, pairs, batches in zip(self.names, self.sizes, self.batch_sizes, drawn, strict=True)
        }


class TaskBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batches of row numbers for a DataLoader over the concatenated datasets; made by the library's trainer."""

    def __init__(
        self,
        dataset: ConcatDataset,
        batch_samplers: list[BatchSampler],
        generator: torch.Generator | None = None,
        seed: int = 0,
        *,
        plan: SamplingPlan,
    ) -> None:
        super().__init__(dataset, batch_samplers, generator, seed)
        self.plan = plan
        # Of changing length: accelerate, which deals batches out to processes, would drop those of another length.
        self.batch_size = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[int]]:
        starts = [0, *itertools.accumulate(self.plan.sizes)]
        parts: list[Any] = self.dataset.datasets
        streams = [
            distinct_batches(rows, size, seed=(self.plan.seed, number), name=name)
            for number, (rows, size, name) in enumerate(
                zip(parts, self.plan.batch_sizes, self.plan.names, strict=True), start=1
            )
        ]
        for number in self.plan.draw_datasets():
            yield [starts[number] + row for row in next(streams[number])]

    def __len__(self) -> int:
        return self.plan.batches


class _Texts:
    """Rows as the library compares them: a column for each text, every hard negative one of its own."""

    column_names: ClassVar[list[str]] = []  # none of them is a label

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[Any, str]:
        row = self._rows[number]
        return {"query": row["query"], "positive": row["positive"], **dict(enumerate(row["negatives"]))}


def distinct_batches(rows: Any, size: int, *, seed: Sequence[int], name: str) -> Iterator[list[int]]:
    """Yield batches of row numbers without end; no two rows of a batch share a text, in any column.

    Args:
        rows: A dataset or a list of mappings with query, positive and negatives.

    Raises:
        DataError: A whole pass does not give one batch.
    """
    (first,) = np.random.SeedSequence(seed).generate_state(1).tolist()
    # The library's sampler adds the number of a pass to its seed.
    sampler = NoDuplicatesBatchSampler(_Texts(rows), size, drop_last=True, generator=torch.Generator(), seed=first)
    for number in itertools.count():
        sampler.set_epoch(number)
        batch = None
        for batch in sampler:
            yield batch
        if batch is None:
            raise DataError(
                f"{name}: its {len(rows):,} rows do not give one batch of {size} without a text that is there "
                "twice; lower --batch-size, or leave the dataset out."
            )


class PairCollator(SentenceTransformerDataCollator):
    """Queries, and documents: the positives in the order of the queries, then every negative of the batch.

    The losses take the first documents for the positives and all of them for candidates, so that rows may have
    different numbers of negatives.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        documents = [row["positive"] for row in features] + [text for row in features for text in row["negatives"]]
        columns = {"query": [row["query"] for row in features], "document": documents}
        named = {"dataset_name": features[0]["dataset_name"]} if "dataset_name" in features[0] else {}
        prompts = self._resolve_prompts(named) or {}
        batch: dict[str, Any] = {}
        for name, texts in columns.items():
            tokens = self.preprocess_fn(texts, prompt=self._get_prompt_for_column(prompts, name))
            batch |= {f"{name}_{key}": value for key, value in tokens.items()}
        return batch | named
