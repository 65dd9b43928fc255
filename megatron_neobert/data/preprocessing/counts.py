"""What became of records, and how many errors end a run."""

from collections import Counter
from dataclasses import dataclass, field

from megatron_neobert.data.corpus.format import describe_reasons
from megatron_neobert.errors import DataError


@dataclass
class Counts:
    """What became of the records read so far: records = documents + rejected + dropped."""

    documents: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    repaired_documents: int = 0
    utf8_bytes: int = 0  # of the texts that were tokenised
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


def check_error_rate(counts: Counts, max_error_rate: float, first_error: str | None) -> None:
    """Raises DataError where more of the records are in error than may be.

    Args:
        first_error: An example: the record's place and what is wrong with it.
    """
    if counts.errors > max_error_rate * counts.records:
        raise too_many_errors(counts, max_error_rate, first_error)


def too_many_errors(counts: Counts, max_error_rate: float, first_error: str | None) -> DataError:
    return DataError(
        f"{counts.errors:,} of {counts.records:,} records have no usable text "
        f"({counts.errors / counts.records:.2%}), more than --max-error-rate {max_error_rate} allows "
        f"({describe_reasons(counts.rejected)}); for example: {first_error}. "
        "Fix the shards, check --text-key, or allow more"
    )


def error_record(first_error: str) -> DataError:
    """What ends a run that is to fail on errors."""
    return DataError(f"{first_error}; mend the record, or leave such records out with --on-error skip")
