"""Counts of what became of records, and the error rate that they are compared with."""

from collections import Counter
from dataclasses import dataclass, field

from megatron_neobert.data.corpus.format import describe_reasons
from megatron_neobert.data.inputs.records import FILTER_FAILED
from megatron_neobert.errors import DataError
from megatron_neobert.text import percent


@dataclass
class Counts:
    """What became of the records read so far: records = documents + rejected + dropped."""

    documents: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    repaired_documents: int = 0
    utf8_bytes: int = 0  # of the texts that were tokenized
    rejected: Counter[str] = field(default_factory=Counter)  # records by reason: errors
    dropped: Counter[str] = field(default_factory=Counter)  # records by the name of the filter

    def add(self, other: "Counts") -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.unknown_tokens += other.unknown_tokens
        self.repaired_documents += other.repaired_documents
        self.utf8_bytes += other.utf8_bytes
        self.rejected.update(other.rejected)
        self.dropped.update(other.dropped)

    @property
    def errors(self) -> int:
        return self.rejected.total()

    @property
    def records(self) -> int:
        return self.documents + self.errors + self.dropped.total()


def check_error_rate(
    counts: Counts, max_error_rate: float, first_error: str | None, *, records: float | None = None
) -> None:
    """Raise DataError if more of the records are in error than may be.

    Args:
        first_error: An example: the record's place and what is wrong with it.
        records: Number of records that the rate is of; None: those counted.
    """
    if counts.errors > max_error_rate * (counts.records if records is None else records):
        remedy = "Fix the shards, check --text-key"
        if max(counts.rejected, key=counts.rejected.__getitem__) == FILTER_FAILED:
            remedy = "Correct the filter, name every field that it reads by --record-key"
        raise DataError(
            f"{counts.errors:,} of {counts.records:,} records have no usable text "
            f"({percent(counts.errors / counts.records, digits=2)}), more than --max-error-rate {max_error_rate} "
            f"allows ({describe_reasons(counts.rejected)}); for example: {first_error}. "
            f"{remedy}, or allow more"
        )
