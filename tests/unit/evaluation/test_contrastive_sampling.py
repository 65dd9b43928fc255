"""Batches of contrastive fine-tuning: one dataset each, no text twice, datasets drawn by size^alpha."""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy.stats import chisquare
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.embed import PlannedBatchSampler, SamplingPlan, distinct_batches


def make_pairs(count: int, *, distinct: int, name: str = "") -> list[dict]:
    """Return pairs with `distinct` different queries; every positive is different."""
    return [{"query": f"{name}q{i % distinct}", "positive": f"{name}p{i}", "negatives": []} for i in range(count)]


def draw(plan: SamplingPlan) -> list[list[int]]:
    library_samplers = [BatchSampler(RandomSampler(pairs), 1, drop_last=True) for pairs in DATASETS]
    sampler = PlannedBatchSampler(ConcatDataset(DATASETS), library_samplers, plan=plan)
    batches = list(sampler)
    assert len(sampler) == len(batches) == plan.batches
    return batches


DATASETS = [make_pairs(60, distinct=20, name="a"), make_pairs(240, distinct=80, name="b"), make_pairs(15, distinct=15)]
PLAN = SamplingPlan(names=("a", "b", "c"), sizes=(60, 240, 15), batch_sizes=(8, 16, 5), alpha=0.5, batches=200, seed=3)


def test_batch_has_pairs_of_one_dataset_and_no_text_twice():
    pairs = list(itertools.chain(*DATASETS))
    dataset_indices = np.repeat(np.arange(3), PLAN.sizes)
    for batch in draw(PLAN):
        (index,) = set(dataset_indices[batch])
        assert len(batch) == PLAN.batch_sizes[index]
        texts = [text for pair in batch for text in {pairs[pair]["query"], pairs[pair]["positive"]}]
        assert len(texts) == len(set(texts))


@pytest.mark.parametrize("column", ["positive", "negatives"])
def test_text_in_another_column_counts_as_repeated(column):
    pairs = make_pairs(4, distinct=4)
    pairs[1][column] = "q0" if column == "positive" else ["q0"]
    batches = list(itertools.islice(distinct_batches(pairs, 3, seed=(0,), name="pairs"), 40))
    assert not any({0, 1} <= set(batch) for batch in batches)


def test_datasets_are_drawn_in_proportion_to_the_root_of_their_size():
    sizes, roots = np.asarray([100, 400, 1600, 6400]), np.asarray([10, 20, 40, 80])
    plan = SamplingPlan(names=tuple("abcd"), sizes=tuple(sizes), batch_sizes=(2,) * 4, alpha=0.5, batches=3000, seed=0)
    counts = np.bincount(plan.draw_datasets(), minlength=4)
    assert chisquare(counts, plan.batches * roots / roots.sum()).pvalue > 0.05
    assert chisquare(counts, plan.batches * sizes / sizes.sum()).pvalue < 1e-9


def test_order_depends_on_the_seed():
    assert draw(PLAN) == draw(PLAN)
    assert draw(PLAN) != draw(dataclasses.replace(PLAN, seed=4))


def test_dataset_without_enough_distinct_texts_is_refused():
    pairs = make_pairs(30, distinct=5)
    with pytest.raises(DataError, match=r"few: its 30 rows do not fill one batch of 6"):
        next(distinct_batches(pairs, 6, seed=(0,), name="few"))
    assert len(next(distinct_batches(pairs, 5, seed=(0,), name="few"))) == 5
