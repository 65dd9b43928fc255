"""Batches of contrastive fine-tuning: one dataset each, no text twice, datasets drawn by size^alpha."""

import itertools

import numpy as np
import pytest
from scipy.stats import chisquare
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.embed import SamplingPlan, TaskBatchSampler, distinct_batches


def make_rows(count: int, *, distinct: int, name: str = "") -> list[dict]:
    """Every text of the first column stands in count / distinct rows."""
    return [{"query": f"{name}q{row % distinct}", "positive": f"{name}p{row}", "negatives": []} for row in range(count)]


def make_sampler(parts: list[list[dict]], plan: SamplingPlan) -> TaskBatchSampler:
    given = [BatchSampler(RandomSampler(part), 1, drop_last=True) for part in parts]
    return TaskBatchSampler(ConcatDataset(parts), given, plan=plan)


PARTS = [make_rows(60, distinct=20, name="a"), make_rows(240, distinct=80, name="b"), make_rows(15, distinct=15)]
PLAN = SamplingPlan(names=("a", "b", "c"), sizes=(60, 240, 15), batch_sizes=(8, 16, 5), alpha=0.5, batches=200, seed=3)


def test_batch_comes_from_one_dataset_in_its_size_and_has_no_text_twice():
    rows = list(itertools.chain(*PARTS))
    number_of = np.repeat(np.arange(3), PLAN.sizes)
    batches = list(make_sampler(PARTS, PLAN))
    assert len(batches) == PLAN.batches == len(make_sampler(PARTS, PLAN))
    for batch in batches:
        (number,) = set(number_of[batch])
        assert len(batch) == PLAN.batch_sizes[number]
        texts = [text for row in batch for text in {rows[row]["query"], rows[row]["positive"]}]
        assert len(texts) == len(set(texts))


@pytest.mark.parametrize("column", ["positive", "negatives"])
def test_text_in_another_column_counts_as_twice(column):
    rows = make_rows(4, distinct=4)
    rows[1][column] = "q0" if column == "positive" else ["q0"]
    batches = list(itertools.islice(distinct_batches(rows, 3, seed=(0,), name="rows"), 40))
    assert not any({0, 1} <= set(batch) for batch in batches)


def test_datasets_are_drawn_by_the_root_of_their_size():
    sizes = (100, 400, 1600, 6400)
    roots = np.asarray([10, 20, 40, 80])
    plan = SamplingPlan(names=tuple("abcd"), sizes=sizes, batch_sizes=(2,) * 4, alpha=0.5, batches=3000, seed=0)
    drawn = np.bincount(plan.draw_datasets(), minlength=4)
    assert chisquare(drawn, plan.batches * roots / roots.sum()).pvalue > 0.05
    assert chisquare(drawn, plan.batches * np.asarray(sizes) / sum(sizes)).pvalue < 1e-9


def test_order_depends_on_the_seed_alone():
    again = make_sampler(PARTS, PLAN)
    assert list(again) == list(again) == list(make_sampler(PARTS, PLAN))
    other = SamplingPlan(**{**vars(PLAN), "seed": 4})
    assert list(make_sampler(PARTS, other)) != list(again)


def test_dataset_without_enough_distinct_texts_is_refused_with_its_numbers():
    rows = make_rows(30, distinct=5)
    with pytest.raises(DataError, match=r"few: its 30 rows do not give one batch of 6"):
        next(distinct_batches(rows, 6, seed=(0,), name="few"))
    assert len(next(distinct_batches(rows, 5, seed=(0,), name="few"))) == 5
