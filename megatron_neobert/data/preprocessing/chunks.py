"""Tokenize one chunk of an input file: write its token ids, lengths, attributes and rejects.

Memory: about 1 MB of text with its ids, and the attributes of all documents of the chunk.
"""

import base64
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_neobert.data.corpus.attribute_columns import pack_columns, plain_value
from megatron_neobert.data.corpus.format import NO_TOKENS, token_dtype
from megatron_neobert.data.inputs.find import InputVersion, input_version
from megatron_neobert.data.inputs.recognise import read_chunk
from megatron_neobert.data.inputs.records import ReadSettings, RecordBatch, Rejected
from megatron_neobert.data.inputs.stream import Chunk, is_url
from megatron_neobert.data.preprocessing.filters import FilterSource, apply_filters
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch, Encoder, open_encoder
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.runtime.jobs import Finished, Job, run_job
from megatron_neobert.runtime.new_file import NewFile

# Reasons of dropped records that are counted one by one.
_MOST_REASONS = 1000
# Key of Counts.dropped for the records with other reasons.
OTHER_REASONS = "other reasons of filters"


@dataclass(frozen=True)
class ChunkSettings:
    """Settings that all chunks of a run share."""

    read: ReadSettings
    tokenizer_model: str
    fingerprint: str  # of the tokenizer when the run was planned
    backend: Literal["auto", "fast", "reference"]
    filters: tuple[FilterSource, ...]


@dataclass
class Counts:
    """Numbers of records and tokens: records = documents + rejected + dropped."""

    documents: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    utf8_bytes: int = 0  # of the texts that the filters kept
    sampled_characters: int = 0  # in a sample of the documents, see Encoder
    unknown_characters: int = 0  # those of the sample that unknown tokens replace
    rejected: Counter[str] = field(default_factory=Counter)  # records in error, by reason
    dropped: Counter[str] = field(default_factory=Counter)  # records dropped without an error, by reason

    def add(self, counts: "Counts") -> None:
        """Add counts. From the 1,001st reason of filters on, records are counted under OTHER_REASONS.

        A filter may give each record a reason of its own, such as a formatted score.
        """
        for name, value in vars(counts).items():
            if name != "dropped":
                setattr(self, name, getattr(self, name) + value)
        for reason, count in counts.dropped.items():
            # A filter's reason follows its label and ": ", which the fixed reasons lack.
            is_kept = reason in self.dropped or len(self.dropped) < _MOST_REASONS or ": " not in reason
            self.dropped[reason if is_kept else OTHER_REASONS] += count

    @property
    def errors(self) -> int:
        return self.rejected.total()

    @property
    def records(self) -> int:
        return self.documents + self.errors + self.dropped.total()


@dataclass(frozen=True)
class ChunkResult:
    """Record of a finished chunk, besides its files."""

    counts: Counts
    input_sha256: str | None  # of the whole input file; None unless this is its first chunk, and for URLs
    encoder: str  # name and version of the tokenizer back end
    compared: int  # documents whose ids were compared with the reference tokenizer
    first_error: str | None


class DamagedInput(DataError):
    """The input file is damaged or has changed."""


@dataclass(frozen=True)
class ChunkJob(Job[ChunkResult]):
    """Job that tokenizes one chunk."""

    result_type = ChunkResult

    chunk: Chunk
    version: InputVersion
    input_name: str  # see input_label
    starts_input: bool  # the first chunk of its input file
    settings: ChunkSettings

    def __str__(self) -> str:
        return self.input_name

    @property
    def key(self) -> str:
        return json.dumps(self.version)

    @property
    def kinds(self) -> Sequence[str]:
        return ["ids", "lengths", "rejects", *(["attributes"] if self.settings.read.record_keys else [])]

    def work(self, files: Mapping[str, NewFile]) -> ChunkResult:
        """Tokenize the chunk, write its files, and return its counts and the back end.

        Raises:
            DamagedInput: The input file is damaged, or has changed since the run was planned.
            DataError: The tokenizer or a filter has changed since the run was planned.
            BackendMismatch: A fast back end failed, or differs from the reference tokenizer.
            MissingInputError, OSError: The input file cannot be read, or an output cannot be written.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # worker processes use the cores, threads would compete
        tokenizer, encoder = _load(self.settings)
        encoder.start_chunk()
        counts = Counts()
        writer = _ChunkWriter(self, tokenizer, encoder, files)
        for batch in self._read():
            try:
                counts.add(writer.add(apply_filters(batch, self.settings.filters, self.input_name)))
            except BackendMismatch as mismatch:
                raise BackendMismatch(
                    f"{self}: {mismatch}. Start again with --tokenizer-backend reference --overwrite"
                ) from mismatch
        if writer.columns:
            files["attributes"].write(pack_columns(writer.columns))
        if input_version(self.chunk.path) != self.version:
            raise DamagedInput(
                f"{self} has changed since the run started; start again with --resume, which reads it again"
            )
        # A remote file is not transferred a second time for its hash.
        counts.sampled_characters, counts.unknown_characters = encoder.sampled_characters, encoder.unknown_characters
        is_hashed = self.starts_input and not is_url(self.chunk.path)
        return ChunkResult(
            counts=counts,
            input_sha256=sha256_of(Path(self.chunk.path)) if is_hashed else None,
            encoder=encoder.name,
            compared=encoder.compared,
            first_error=writer.first_error,
        )

    def _read(self) -> Iterator[RecordBatch]:
        try:
            yield from read_chunk(self.chunk, self.settings.read)
        except DataError as error:
            raise DamagedInput(str(error).replace(self.chunk.path, self.input_name)) from error


def tokenize_chunk(job: ChunkJob) -> Finished[ChunkResult] | str:
    """Run a job. Return its record, or the reason why its input is damaged, so that other jobs continue."""
    try:
        return run_job(job)
    except DamagedInput as damage:
        return str(damage)


class _ChunkWriter:
    """Tokenizes the batches of a chunk and writes its files."""

    def __init__(self, job: ChunkJob, tokenizer: Tokenizer, encoder: Encoder, files: Mapping[str, NewFile]) -> None:
        self.first_error: str | None = None
        self.columns: dict[str, list[object]] = {key: [] for key in job.settings.read.record_keys or ()}
        self._job, self._encoder, self._files = job, encoder, files
        self._dtype, self._unknown = token_dtype(tokenizer.vocab_size), tokenizer.unk_id

    def add(self, batch: RecordBatch) -> Counts:
        """Tokenize and write a batch, and return its counts. Texts without tokens are counted in `batch.dropped`.

        Raise BackendMismatch if a fast back end failed or gave other ids than the reference.
        """
        for record in batch.rejected:
            self._write_reject(record)
        counts = Counts(
            utf8_bytes=batch.utf8_bytes,
            rejected=Counter(record.reason for record in batch.rejected),
            dropped=batch.dropped,
        )
        if not batch.texts:
            return counts
        ids, lengths = self._encoder.encode_batch(batch.texts)
        with_tokens = np.flatnonzero(lengths).tolist()
        self._files["ids"].write(ids.astype(self._dtype, copy=False).tobytes())
        self._files["lengths"].write(lengths[with_tokens].astype("<i4", copy=False).tobytes())
        # Long values are shortened here, because a field may be a whole page.
        for key, values in self.columns.items():
            values += (plain_value(batch.origins[index].fields.get(key)) for index in with_tokens)
        if len(with_tokens) < lengths.size:
            counts.dropped[NO_TOKENS] += lengths.size - len(with_tokens)
        counts.documents, counts.tokens = len(with_tokens), ids.size
        counts.unknown_tokens = int(np.count_nonzero(ids == self._unknown))
        return counts

    def _write_reject(self, record: Rejected) -> None:
        job = self._job
        entry: dict[str, Any] = {"file": job.input_name, job.chunk.unit: record.number}
        if job.chunk.numbers_are_relative:
            entry["after_byte"] = job.chunk.start
        entry |= {"reason": record.reason, "detail": record.detail}
        try:
            entry["raw"] = record.raw.decode()
        except UnicodeDecodeError:
            entry["raw_base64"] = base64.b64encode(record.raw).decode()
        # Lone surrogates, which names of files may have, are written as JSON escapes.
        self._files["rejects"].write(json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        self.first_error = self.first_error or record.describe(job.chunk, job.input_name)


# Tokenizers of this process, by fingerprint and `is_reference`. All jobs of a run share a tokenizer, because loading
# takes up to half a second and a fast back end caches the words of earlier jobs.
_loaded: dict[tuple[str, bool], tuple[Tokenizer, Encoder]] = {}


def cache_tokenizer(tokenizer: Tokenizer, encoder: Encoder) -> None:
    """Make the jobs of this process use a tokenizer that is loaded already."""
    _loaded[tokenizer.fingerprint, encoder.is_reference] = tokenizer, encoder


def _load(settings: ChunkSettings) -> tuple[Tokenizer, Encoder]:
    """Return the run's tokenizer and encoder, loaded once per process. Raise DataError if the tokenizer has changed."""
    key = settings.fingerprint, settings.backend == "reference"
    if key not in _loaded:
        tokenizer = load_tokenizer(settings.tokenizer_model)
        if tokenizer.fingerprint != settings.fingerprint:
            raise DataError(
                f"--tokenizer-model {settings.tokenizer_model} has changed since the run started; start again"
            )
        _loaded[key] = tokenizer, open_encoder(tokenizer, settings.backend, probe=False)
    return _loaded[key]
