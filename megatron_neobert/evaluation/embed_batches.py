"""Batches of contrastive fine-tuning.

Every batch has pairs of one dataset, drawn with p ~ size^alpha, and no text twice. The order of the batches depends
only on the data and the seed. Within a dataset it is the order of sentence-transformers' NoDuplicatesBatchSampler.
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
    """Settings of the batch order. Tuples follow the order of the DatasetDict."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # pairs per dataset
    batch_sizes: tuple[int, ...]  # pairs per batch
    alpha: float
    batches: int  # of all processes
    seed: int

    def draw_datasets(self) -> np.ndarray:
        """Return the index of the dataset of each batch."""
        weights = np.asarray(self.sizes, dtype=np.float64) ** self.alpha
        generator = np.random.default_rng([self.seed, 0])
        return generator.choice(len(self.sizes), size=self.batches, p=weights / weights.sum())


class PlannedBatchSampler(MultiDatasetDefaultBatchSampler):
    """Yields the batches of a plan as indices into the concatenated datasets. The trainer constructs it."""

    def __init__(
        self, dataset: ConcatDataset, batch_samplers: list[BatchSampler], *, plan: SamplingPlan, **arguments: Any
    ) -> None:
        super().__init__(dataset, batch_samplers, **arguments)
        self.plan = plan
        # Batch sizes differ. With a fixed size, accelerate would drop batches of other sizes.
        self.batch_size = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[int]]:
        offsets = [0, *itertools.accumulate(self.plan.sizes)]
        streams = [
            distinct_batches(dataset, batch_size, seed=(self.plan.seed, number), name=name)
            for number, (dataset, batch_size, name) in enumerate(
                zip(self.dataset.datasets, self.plan.batch_sizes, self.plan.names, strict=True), start=1
            )
        ]
        for index in self.plan.draw_datasets():
            yield [offsets[index] + pair for pair in next(streams[index])]

    def __len__(self) -> int:
        return self.plan.batches


class _TextColumns:
    """View of a dataset of pairs with one column per text, as NoDuplicatesBatchSampler reads it."""

    column_names: ClassVar[list[str]] = []  # the sampler looks for label columns here

    def __init__(self, pairs: Any) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[Any, str]:
        pair = self._pairs[index]
        return {"query": pair["query"], "positive": pair["positive"], **dict(enumerate(pair["negatives"]))}


def distinct_batches(pairs: Any, batch_size: int, *, seed: Sequence[int], name: str) -> Iterator[list[int]]:
    """Yield batches of `batch_size` indices into `pairs`, without end. Every pass over the pairs has a new order.

    No two pairs of a batch share a text, in any column. Pairs that do not fill a last batch are left out of a pass. If
    shared texts leave a pass with fewer than len(pairs) // batch_size batches, pairs are drawn again to fill the rest.
    Raises DataError, with the `name` of the dataset, if a pass does not fill one batch.
    """
    (sampler_seed,) = np.random.SeedSequence(seed).generate_state(1).tolist()
    sampler = NoDuplicatesBatchSampler(
        _TextColumns(pairs), batch_size, drop_last=True, generator=torch.Generator(), seed=sampler_seed
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)  # shuffles anew: the sampler adds the epoch to its seed
        batch = None
        for batch in sampler:
            yield batch
        if batch is None:
            raise DataError(
                f"{name}: its {len(pairs):,} rows do not fill one batch of {batch_size} without repeating a text; "
                "lower --batch-size, raise the divisor of the dataset, or leave it out."
            )


class PairCollator(SentenceTransformerDataCollator):
    """Tokenizes a batch into the columns query and document.

    The documents are the positives in the order of the queries, then all negatives of the batch. The losses match the
    first documents to the queries and use all documents as candidates, so pairs may have different numbers of
    negatives.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        documents = [pair["positive"] for pair in features] + [text for pair in features for text in pair["negatives"]]
        columns = {"query": [pair["query"] for pair in features], "document": documents}
        dataset = {"dataset_name": features[0]["dataset_name"]} if "dataset_name" in features[0] else {}
        prompts = self._resolve_prompts(dataset) or {}
        batch: dict[str, Any] = {}
        for name, texts in columns.items():
            tokens = self.preprocess_fn(texts, prompt=self._get_prompt_for_column(prompts, name))
            batch |= {f"{name}_{key}": value for key, value in tokens.items()}
        return batch | dataset
