"""What pseudo-perplexity comes to: lines of documents on disk, and the curve over their lengths.

Of a document with N tokens of which K were drawn, the mean loss has the standard error s sqrt((1 - K/N) / K), s² being
the variance of the K losses: none when all tokens were masked. Documents are averaged as logarithms, because there the
drawing is unbiased, while exp raises every drawn value. The band is the 95 % Student interval of that average over the
documents of a bin, each taken as one observation, so it holds the noise of the drawing as well.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

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


# Of a point of the curve; `low` and `high` are None where there are too few documents to know their spread.
COLUMNS = ("above", "up_to", "documents", "mean_length", "pseudo_perplexity", "low", "high", "arithmetic_mean")


def read_results(file: LineFile) -> dict[str, DocumentResult]:
    """The documents that have been measured, by id.

    Raises:
        DataError: Some whole line is not one of these.
    """
    try:
        found = [DocumentResult(**line) for line in file.lines]
    except TypeError as error:
        raise DataError(f"{file.path}: not results of documents ({error}); remove the file.") from error
    return {result.id: result for result in found}


def average_by_length(results: Iterable[DocumentResult], length_bins: Sequence[int]) -> list[dict[str, Any]]:
    """The curve: one point per bin that has documents, by increasing length."""
    groups: dict[int, list[DocumentResult]] = {}
    for result in results:
        groups.setdefault(bin_of(result.length, length_bins), []).append(result)
    curve = []
    for number in sorted(groups):
        losses = [result.mean_nll for result in groups[number]]
        mean = fmean(losses)
        band: list[float | None] = [None, None]
        if len(losses) >= _DOCUMENTS_OF_BAND:
            half = float(student.ppf((1 + _CONFIDENCE) / 2, len(losses) - 1)) * stdev(losses) / math.sqrt(len(losses))
            band = [math.exp(mean - half), math.exp(mean + half)]
        ends = (0, *length_bins, None)  # longer than the one, and no longer than the next
        lengths = fmean(result.length for result in groups[number])
        # exp of the documents' average loss; and the average of their pseudo-perplexities.
        values = (len(losses), lengths, math.exp(mean), *band, fmean(map(math.exp, losses)))
        curve.append(dict(zip(COLUMNS, (*ends[number : number + 2], *values), strict=True)))
    return curve


def average_over_tokens(results: Sequence[DocumentResult]) -> dict[str, float | None]:
    """As if all documents were one: each counts as often as it has tokens, however many of them were drawn.

    The standard error is that of the positions that were not drawn; None where a document has a single one.
    """
    tokens = sum(result.tokens for result in results)
    mean = math.fsum(result.tokens * result.mean_nll for result in results) / tokens
    known = [result.tokens * error for result in results if (error := result.standard_error) is not None]
    error = math.exp(mean) * math.hypot(*known) / tokens if len(known) == len(results) else None
    return {"pseudo_perplexity": math.exp(mean), "standard_error": error, "nats_per_token": mean}
