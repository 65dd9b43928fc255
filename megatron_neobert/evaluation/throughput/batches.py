"""Batches for measuring speed: random tokens, the same documents whatever the layout, the model and its dtype.

Shapes: `b` rows, `s` tokens of a row. A padded batch has one document per row, filled up to the longest; a packed one
has a single row of documents laid end to end. Only tokens of documents count as tokens; slots include the padding.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

WEB_MEDIAN_TOKENS = 368
# RefinedWeb has mean / median = 640 / 368, which is exp(sigma^2 / 2) of a log-normal.
WEB_SIGMA = math.sqrt(2 * math.log(640 / WEB_MEDIAN_TOKENS))
MASKED_SHARE = 0.2  # of the tokens, as NeoBERT's pre-training
_IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """What a model is called with."""

    inputs: dict[str, Any]
    tokens: int
    slots: int


def draw_lengths(count: int, *, longest: int, distribution: str, seed: int) -> list[int]:
    """Tokens of each document; a larger batch begins with the documents of a smaller one.

    Args:
        distribution: full: each has `longest` tokens; web: log-normal as web pages are about, cut there.
    """
    if distribution == "full":
        return [longest] * count
    rng = random.Random(f"{seed} {longest}")
    return [min(int(rng.lognormvariate(math.log(WEB_MEDIAN_TOKENS), WEB_SIGMA)) + 1, longest) for _ in range(count)]


def build_batch(
    lengths: Sequence[int], *, layout: str, labels: bool, config: Any, seed: int, device: torch.device | str
) -> Batch:
    """Documents of these lengths; with labels, a fifth of the tokens is to be predicted.

    Args:
        config: Of the model: its vocabulary, and the padding that no document may contain, because some models
            take their positions from it.
    """
    generator = torch.Generator().manual_seed(seed)
    pad = config.pad_token_id or 0
    tokens = sum(lengths)
    ids_s = torch.randint(0, config.vocab_size - 1, (tokens,), generator=generator)
    ids_s += ids_s >= pad  # every token but the padding
    targets_s = torch.where(torch.rand(tokens, generator=generator) < MASKED_SHARE, ids_s, _IGNORED)
    targets_s[0] = ids_s[0]  # a loss without any token would be no loss
    lay_out = _pad if layout == "padded" else _pack
    inputs = lay_out(ids_s, targets_s if labels else None, lengths, pad)
    on_device = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return Batch(on_device, tokens=tokens, slots=inputs["input_ids"].numel())


def _pad(ids_s: Tensor, targets_s: Tensor | None, lengths: Sequence[int], pad: int) -> dict[str, Any]:
    def rows(values_s: Tensor, filling: int) -> Tensor:
        return pad_sequence(list(values_s.split(list(lengths))), batch_first=True, padding_value=filling)

    inputs = {"input_ids": rows(ids_s, pad), "attention_mask": rows(torch.ones_like(ids_s), 0)}
    return inputs if targets_s is None else inputs | {"labels": rows(targets_s, _IGNORED)}


def _pack(ids_s: Tensor, targets_s: Tensor | None, lengths: Sequence[int], pad: int) -> dict[str, Any]:
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    inputs = {"input_ids": ids_s[None], "cu_seqlens": starts, "max_seqlen": max(lengths)}
    return inputs if targets_s is None else inputs | {"labels": targets_s[None]}
