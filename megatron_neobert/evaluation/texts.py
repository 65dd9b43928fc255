"""Texts of pseudo-perplexity. Imports neither torch nor datasets, so that a wrong --text-key is reported at once."""

from collections import Counter
from collections.abc import Iterator

from megatron_neobert.data.inputs.find import find_inputs
from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.options import PerplexityOptions


def require_texts(options: PerplexityOptions) -> None:
    """Raise DataError if no record of the inputs has a text. Reading ends at the first text."""
    dropped = Counter[str]()
    if next(read_texts(options, dropped), None) is None:
        raise no_document(options, dropped)


def read_texts(options: PerplexityOptions, dropped: Counter[str]) -> Iterator[list[str]]:
    """Yield the texts of all inputs in non-empty batches. Count rejected and dropped records by reason in `dropped`."""
    settings = ReadSettings(text_key=options.text_key)
    for path in find_inputs(options.data):
        for chunk in split_into_chunks(path, settings):
            for batch in read_chunk(chunk, settings):
                dropped.update(rejected.reason for rejected in batch.rejected)
                dropped.update(batch.dropped)
                if batch.texts:
                    yield batch.texts


def no_document(options: PerplexityOptions, dropped: Counter[str]) -> DataError:
    """Return a DataError for a run without documents. The message has the number of dropped records by reason."""
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in dropped.items()) or "no record"
    return DataError(
        f"--data {' '.join(options.data)} has no document to measure ({reasons}); "
        f"check --text-key {options.text_key} and --min-length {options.min_length}."
    )
