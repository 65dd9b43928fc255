"""Lengths that do not change from one micro-batch to the next, for kernels and memory that are planned once.

What varies is filled up to a length that nearly every micro-batch stays below: six standard deviations above the mean.
A micro-batch that exceeds it gets the next multiple of that length.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.batches.rows import BatchSettings, Source, pack_window

IGNORED_LABEL = -100  # at a masked position that only fills up; torch's cross-entropy ignores the same
_DEVIATIONS = 6  # exceeded once in 10^9 draws, if they are normal
_MASKED_MULTIPLE = 128  # FP8 and tensor-core tiles want multiples of 16 and 128
_DOCUMENTS_MULTIPLE = 64


def usual_masked(tokens: int, *, probability: float) -> int:
    """Masked positions to make room for in `tokens` slots."""
    deviation = math.sqrt(tokens * probability * (1 - probability))
    return _round_up(tokens * probability + _DEVIATIONS * deviation, _MASKED_MULTIPLE)


def usual_documents(sources: Sequence[Source], settings: BatchSettings) -> int:
    """Documents to make room for in a micro-batch, dummy documents among them.

    Goes by the rows of the first window: how many documents share a row varies a hundredfold between web pages and
    single sentences, and empty documents cost attention kernels time. (Web pages in 64 rows of 1,024: 256 for 139 on
    average and at most 201 in 1,000 micro-batches; sentences: 5,376 for 3,804 and 4,231.)
    """
    if settings.batch_layout == "concatenated":
        return _round_up(settings.micro_batch_size + 1, _DOCUMENTS_MULTIPLE)
    documents_of_rows = np.diff(pack_window(sources, settings, epoch=0, window=0).row_offsets)
    mean, square = float(documents_of_rows.mean()), float((documents_of_rows**2).mean())
    rows_at_once = settings.micro_batch_size
    deviation = math.sqrt(rows_at_once * max(0.0, square - mean**2))
    return _round_up(rows_at_once * mean + _DEVIATIONS * deviation + 1, _DOCUMENTS_MULTIPLE)


def fill_up(values: NDArray[np.generic], usual: int, filler: int) -> NDArray[np.generic]:
    """The values and as many fillers as it takes to reach `usual` entries or the next multiple of that."""
    missing = usual * max(1, -(-len(values) // usual)) - len(values)
    return np.concatenate([values, np.full(missing, filler, dtype=values.dtype)])


def _round_up(number: float, multiple: int) -> int:
    return max(1, math.ceil(number / multiple)) * multiple
