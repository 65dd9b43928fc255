"""What pseudo-perplexity comes to: lines of documents on disk, and the curve over their lengths.

Of a document with N tokens of which K were drawn, the mean loss has the standard error s sqrt((1 - K/N) / K), s² being
the variance of the K losses: none when all tokens were masked. Documents are averaged as logarithms, because there the
drawing is unbiased, while exp raises every drawn value. The band is the 95 % Student interval of that average over the
documents of a bin, each taken as one observation, so it holds the noise of the drawing as well.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import t as student

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.pseudo_perplexity.documents import bin_of
from megatron_neobert.evaluation.records import LineFile

BAND = "95 % of the average over documents"
_CONFIDENCE = 0.95
_DOCUMENTS_OF_BAND = 5  # of fewer, Student's interval spans orders of magnitude


@dataclass(frozen=True, kw_only=True)
class DocumentResult:
    """One line of the file of documents; losses in nats."""

    id: str
    length: int  # tokens of the row, those that the tokenizer adds included
    truncated: bool
    tokens: int  # that could be masked
    positions: int  # that were
    nll_sum: float
    nll_variance: float | None  # of the positions' losses; None of a single one

    @property
    def mean_nll(self) -> float:
        return self.nll_sum / self.positions

    @property
    def standard_error(self) -> float | None:
        """Of `mean_nll`, for the positions that were not drawn; None where one position tells nothing about others."""
        if self.positions == self.tokens:
            return 0.0
        if self.nll_variance is None:
            return None
        return math.sqrt(self.nll_variance / self.positions * (1 - self.positions / self.tokens))


@dataclass(frozen=True)
class Bin:
    """The documents longer than `above` and no longer than `up_to` tokens."""

    above: int
    up_to: int | None
    documents: int
    mean_length: float
    pseudo_perplexity: float  # exp of the documents' average loss
    low: float | None  # None: too few documents to tell their spread
    high: float | None
    arithmetic_mean: float  # of the documents' pseudo-perplexities


@dataclass(frozen=True)
class Overall:
    """Of all tokens of all documents together."""

    pseudo_perplexity: float
    standard_error: float | None  # for the positions that were not drawn; None where a document has a single one
    nats_per_token: float


class ResultFile:
    """The documents that have been measured, each written as soon as it is known."""

    def __init__(self, path: Path) -> None:
        """Reads what is there.

        Raises:
            DataError: Some whole line is not one of these.
        """
        self.file = LineFile(path)
        try:
            found = [DocumentResult(**line) for line in self.file.lines]
        except TypeError as error:
            raise DataError(f"{path}: not results of documents ({error}); remove the file.") from error
        self.results = {result.id: result for result in found}

    def add(self, result: DocumentResult) -> None:
        self.file.add(asdict(result))
        self.results[result.id] = result


def average_by_length(results: Iterable[DocumentResult], length_bins: Sequence[int]) -> list[Bin]:
    """The curve: one point per bin that has documents, by increasing length."""
    groups: dict[int, list[DocumentResult]] = {}
    for result in results:
        groups.setdefault(bin_of(result.length, length_bins), []).append(result)
    ends: list[int | None] = [*length_bins, None]
    return [
        _average(groups[number], 0 if number == 0 else length_bins[number - 1], ends[number])
        for number in sorted(groups)
    ]


def _average(results: Sequence[DocumentResult], above: int, up_to: int | None) -> Bin:
    losses = [result.mean_nll for result in results]
    mean, half = fmean(losses), None
    if len(losses) >= _DOCUMENTS_OF_BAND:
        half = float(student.ppf((1 + _CONFIDENCE) / 2, len(losses) - 1)) * stdev(losses) / math.sqrt(len(losses))
    return Bin(
        above=above,
        up_to=up_to,
        documents=len(results),
        mean_length=fmean(result.length for result in results),
        pseudo_perplexity=math.exp(mean),
        low=None if half is None else math.exp(mean - half),
        high=None if half is None else math.exp(mean + half),
        arithmetic_mean=fmean(map(math.exp, losses)),
    )


def average_over_tokens(results: Sequence[DocumentResult]) -> Overall:
    """As if all documents were one: each counts as often as it has tokens, however many of them were drawn."""
    tokens = sum(result.tokens for result in results)
    mean = math.fsum(result.tokens * result.mean_nll for result in results) / tokens
    errors = [result.standard_error for result in results]
    known = [result.tokens * error for result, error in zip(results, errors, strict=True) if error is not None]
    error = math.exp(mean) * math.hypot(*known) / tokens if len(known) == len(results) else None
    return Overall(math.exp(mean), error, mean)
