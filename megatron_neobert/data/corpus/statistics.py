"""How long the documents of a corpus are, exact and from their lengths alone.

Counts every distinct length, so memory grows with these (a web corpus has some 100,000) and not with the documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERCENTS = (5, 25, 50, 75, 95, 99)
CUTS = (1024, 2048)  # tokens: the sequence lengths that NeoBERT was trained with


@dataclass(frozen=True)
class Statistics:
    """Lengths of documents in tokens, without special tokens."""

    mean: float
    shortest: int
    percentiles: dict[str, int]  # by percent: the smallest length that so many percent of the documents do not exceed
    longest: int
    documents_above: dict[str, float]  # by cut: share of the documents that are longer
    tokens_above: dict[str, float]  # by cut: share of all tokens that lie behind the cut of their document

    def describe(self) -> dict[str, str]:
        """Rows of a table: name and value."""
        percentiles = ", ".join(
            f"{'median' if percent == '50' else f'{percent} %'} {length:,}"
            for percent, length in self.percentiles.items()
        )
        return {
            "tokens/document": (
                f"mean {self.mean:,.1f}, shortest {self.shortest:,}, {percentiles}, longest {self.longest:,}"
            ),
            **{
                f"over {int(cut):,} tokens": (
                    f"{share:.2%} of the documents, with {self.tokens_above[cut]:.2%} of the tokens behind the cut"
                )
                for cut, share in self.documents_above.items()
            },
        }


class LengthCounts:
    """How many documents have which length; filled chunk by chunk."""

    def __init__(self) -> None:
        self._lengths = np.zeros(0, dtype=np.int64)  # distinct, ascending
        self._counts = np.zeros(0, dtype=np.int64)

    @property
    def documents(self) -> int:
        return int(self._counts.sum())

    @property
    def tokens(self) -> int:
        return int(self._lengths @ self._counts)

    def add(self, lengths: NDArray[np.int32]) -> None:
        new, counts = np.unique(lengths, return_counts=True)
        together = np.concatenate([self._lengths, new])
        self._lengths, owners = np.unique(together, return_inverse=True)
        both = np.concatenate([self._counts, counts])
        self._counts = np.zeros(self._lengths.size, dtype=np.int64)
        np.add.at(self._counts, owners, both)

    def statistics(self) -> Statistics:
        """Of at least one document."""
        documents, tokens = self.documents, self.tokens
        return Statistics(
            mean=round(tokens / documents, 2),
            shortest=int(self._lengths[0]),
            percentiles=dict(self._percentiles()),
            longest=int(self._lengths[-1]),
            documents_above={
                str(cut): round(int(self._counts[self._lengths > cut].sum()) / documents, 6) for cut in CUTS
            },
            tokens_above={
                str(cut): round(int(np.maximum(self._lengths - cut, 0) @ self._counts) / tokens, 6) for cut in CUTS
            },
        )

    def _percentiles(self) -> Iterator[tuple[str, int]]:
        not_longer = np.cumsum(self._counts)
        for percent in PERCENTS:
            wanted = -(-percent * int(not_longer[-1]) // 100)
            yield str(percent), int(self._lengths[np.searchsorted(not_longer, wanted)])
