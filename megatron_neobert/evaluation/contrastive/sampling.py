"""Which pairs make a batch: one dataset per batch, drawn with p ~ size^alpha, and no text twice in it.

The order is a function of the seed alone, so that a resumed run finds the batches it would have had. A dataset is
read in passes over a random order; a row that shares a text with the batch waits for the next one, and what is left
when a pass cannot fill another batch is mixed into the next pass.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from torch.utils.data import BatchSampler, ConcatDataset

from megatron_neobert.errors import DataError


class Rows(Protocol):
    """A dataset or a list of mappings with query, positive and negatives."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


@dataclass(frozen=True)
class SamplingPlan:
    """How batches are drawn; datasets in the order of the DatasetDict."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # rows
    batch_sizes: tuple[int, ...]  # pairs
    alpha: float
    batches: int
    seed: int

    @property
    def probabilities(self) -> np.ndarray:
        weights = np.asarray(self.sizes, dtype=np.float64) ** self.alpha
        return weights / weights.sum()

    def draw_datasets(self) -> np.ndarray:
        """The number of the dataset that each batch is from."""
        generator = np.random.default_rng([self.seed, 0])
        return generator.choice(len(self.sizes), size=self.batches, p=self.probabilities)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Rows, pairs per batch, probability and number of batches of every dataset."""
        drawn = self.draw_datasets()
        return {
            name: {
                "rows": self.sizes[number],
                "pairs_per_batch": self.batch_sizes[number],
                "probability": round(float(self.probabilities[number]), 6),
                "batches": int((drawn == number).sum()),
            }
            for number, name in enumerate(self.names)
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


def distinct_batches(rows: Rows, size: int, *, seed: Sequence[int], name: str) -> Iterator[list[int]]:
    """Batches of row numbers without end; no two rows of a batch share a text, in any column.

    Raises:
        DataError: A whole pass does not give one batch.
    """
    for number in itertools.count():
        order = np.random.default_rng([*seed, number]).permutation(len(rows))
        waiting: list[int] = []
        position = produced = 0
        while True:
            batch, waiting, position = _fill(rows, size, order, waiting, position)
            if len(batch) < size:
                break
            produced += 1
            yield batch
        if not produced:
            raise DataError(
                f"{name}: its {len(rows):,} rows do not give one batch of {size} without a text that stands there "
                "twice; lower --batch-size, or leave the dataset out."
            )


def _fill(
    rows: Rows, size: int, order: np.ndarray, waiting: list[int], position: int
) -> tuple[list[int], list[int], int]:
    """A batch, the rows that wait, and how much of the order has been used."""
    batch: list[int] = []
    texts: set[str] = set()
    still_waiting: list[int] = []
    remaining = iter(waiting)
    while len(batch) < size:
        row = next(remaining, None)
        if row is None:
            if position == len(order):
                break
            row, position = int(order[position]), position + 1
        content = rows[row]
        own = {content["query"], content["positive"], *content["negatives"]}
        if texts.isdisjoint(own):
            batch.append(row)
            texts |= own
        else:
            still_waiting.append(row)
    return batch, still_waiting + list(remaining), position


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
