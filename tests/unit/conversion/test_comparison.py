"""The comparison: figures that follow from the logits given, and prompts that are the same everywhere."""

import math

import pytest
import torch

from checkpoint_conversion.comparison import build_prompts, compare_logits


def test_figures_follow_from_the_logits():
    first = torch.tensor([[[4.0, 0.0], [0.0, 2.0]]])
    second = torch.tensor([[[4.0, 0.0], [1.0, 0.5]]])
    comparison = compare_logits(first, second, torch.ones(1, 2))
    assert comparison.tokens == 2
    assert comparison.largest_logit == 4.0
    assert comparison.max_abs == 1.5
    assert comparison.relative == 1.5 / 4.0
    assert comparison.cosine == pytest.approx(0.5 / math.sqrt(1.25))
    assert comparison.argmax_agreement == 0.5


def test_padding_is_left_out():
    first = torch.zeros(1, 2, 3)
    first[0, 0, 0] = 1.0
    second = first.clone()
    second[0, 1] = 100.0
    assert compare_logits(first, second, torch.tensor([[1, 0]])).max_abs == 0.0
    assert compare_logits(first, second, torch.tensor([[1, 1]])).max_abs == 100.0


def test_logits_that_are_not_numbers_are_never_within_a_tolerance():
    first = torch.ones(1, 1, 3)
    assert not compare_logits(first, first * math.nan, torch.ones(1, 1)).within(1e9)


@pytest.mark.parametrize("longest", [4096, 50])
def test_prompts_are_padded_the_same_every_time_and_never_too_long(longest: int):
    first, second = (build_prompts(300, longest=longest) for _ in range(2))
    assert torch.equal(first.tokens_bs, second.tokens_bs)
    lengths = first.attention_mask_bs.sum(1)
    assert lengths.tolist() == [min(tokens, longest) for tokens in (7, 23, 64, 128)]
    assert first.tokens_bs.min() >= 0
    assert first.tokens_bs.max() < 300
