"""The job that tokenizes one chunk of an input file: token ids, lengths, hashes, attributes and rejects.

Memory: one batch of about 1 MB of text and its ids, for any size of the chunk, and the attributes of its documents.
"""

import base64
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatron_neobert.data.corpus.attribute_columns import pack_columns, plain_value
from megatron_neobert.data.corpus.format import NO_TOKENS, reject_line, token_dtype
from megatron_neobert.data.inputs.find import InputVersion, input_sha256, input_version
from megatron_neobert.data.inputs.recognise import read_chunk
from megatron_neobert.data.inputs.records import ReadSettings, RecordBatch, Rejected
from megatron_neobert.data.inputs.stream import Chunk, InputDigest
from megatron_neobert.data.preprocessing.filters import FilterSource, apply_filters
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch, Encoder, open_encoder
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.jobs import Finished, Job, run_job
from megatron_neobert.runtime.new_file import NewFile

HASH_BYTES = 16  # blake2b of a document's text; of 10^9 different texts, two are taken for equal once in 10^20 runs


@dataclass(frozen=True)
class ChunkSettings:
    """Settings that are the same for all chunks of a run."""

    read: ReadSettings
    tokenizer_model: str
    tokenizer_type: str
    fingerprint: str  # of the tokenizer that the run was planned with
    backend: Literal["auto", "fast", "reference"]
    filters: tuple[FilterSource, ...]
    with_hashes: bool


@dataclass
class Counts:
    """Counts of the records read so far: records = documents + rejected + dropped."""

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


@dataclass(frozen=True)
class ChunkResult:
    """Facts about a finished chunk that its files do not hold."""

    counts: Counts
    input_sha256: str | None  # of the whole input file, with its first chunk; None for some URLs too
    numbers: int  # record numbers used up
    encoder: str
    compared: int  # documents whose ids a fast back end had to have in common with the reference
    first_error: str | None


class DamagedInput(DataError):
    """The input file, and not our work, is why the chunk cannot be done."""


@dataclass(frozen=True)
class ChunkJob(Job[ChunkResult]):
    """One chunk, and everything that a worker has to know to tokenize it."""

    result_type = ChunkResult

    chunk: Chunk
    version: InputVersion
    input_name: str  # for people, see input_label
    starts_input: bool
    settings: ChunkSettings

    def __str__(self) -> str:
        return self.input_name

    @property
    def key(self) -> str:
        return json.dumps(self.version)

    @property
    def kinds(self) -> Sequence[str]:
        more = {"hashes": self.settings.with_hashes, "attributes": bool(self.settings.read.record_keys)}
        return ["ids", "lengths", "rejects", *(kind for kind, is_wanted in more.items() if is_wanted)]

    def work(self, files: Mapping[str, NewFile]) -> ChunkResult:
        """Tokenize the chunk.

        Raises:
            DamagedInput: The input file cannot be read to its end, or has changed.
            DataError: The tokenizer has changed.
            BackendMismatch: A fast back end differs from the reference tokenizer.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores, not threads
        tokenizer, encoder = _load(self.settings)
        encoder.start_part()
        counts, numbers = Counts(), 0
        writer = _ChunkWriter(self, tokenizer, encoder, files)
        digest = InputDigest() if self.starts_input and self.chunk.end is None else None
        for batch in self._read(digest):
            try:
                counts.add(writer.add(apply_filters(batch, self.settings.filters, self.input_name)))
            except BackendMismatch as mismatch:
                raise BackendMismatch(
                    f"{self}: {mismatch}. Start again with --tokenizer-backend reference --overwrite"
                ) from mismatch
            numbers += batch.numbers
        if writer.columns:
            files["attributes"].write(pack_columns(writer.columns))
        if input_version(self.chunk.path) != self.version:
            raise DamagedInput(
                f"{self} has changed since the run started; start again with --resume, which reads it anew"
            )
        whole_sha256 = digest.of_all(self.version.bytes) if digest else None
        if self.starts_input and whole_sha256 is None:  # not all of its bytes have passed by: they are read again
            whole_sha256 = input_sha256(self.chunk.path)
        return ChunkResult(
            counts=counts,
            input_sha256=whole_sha256,
            numbers=numbers,
            encoder=encoder.name,
            compared=encoder.compared,
            first_error=writer.first_error,
        )

    def _read(self, digest: InputDigest | None) -> Iterator[RecordBatch]:
        try:
            yield from read_chunk(self.chunk, self.settings.read, digest)
        except DataError as error:
            raise DamagedInput(str(error).replace(self.chunk.path, self.input_name)) from error


def tokenize_chunk(job: ChunkJob) -> Finished[ChunkResult] | str:
    """Do a job, and return its record, or why its input is damaged, which does not stop other jobs."""
    try:
        return run_job(job)
    except DamagedInput as damage:
        return str(damage)


class _ChunkWriter:
    """Writes the files of a chunk, batch by batch."""

    def __init__(self, job: ChunkJob, tokenizer: Tokenizer, encoder: Encoder, files: Mapping[str, NewFile]) -> None:
        self.first_error: str | None = None
        self.columns: dict[str, list[object]] = {key: [] for key in job.settings.read.record_keys or ()}
        self._job, self._encoder, self._files = job, encoder, files
        self._dtype, self._unknown = token_dtype(tokenizer.vocab_size), tokenizer.unk_id

    def add(self, batch: RecordBatch) -> Counts:
        for record in batch.rejected:
            self._reject(record)
        counts = Counts(rejected=Counter(record.reason for record in batch.rejected), dropped=batch.dropped)
        if not batch.texts:
            return counts
        ids, lengths = self._encoder.encode_batch(batch.texts)
        kept = np.flatnonzero(lengths).tolist()  # places of the documents that have tokens
        self._files["ids"].write(ids.astype(self._dtype, copy=False).tobytes())
        self._files["lengths"].write(lengths[kept].astype("<i4", copy=False).tobytes())
        if self._job.settings.with_hashes:
            texts = (batch.texts[place].encode() for place in kept)
            hashes = b"".join(hashlib.blake2b(text, digest_size=HASH_BYTES).digest() for text in texts)
            self._files["hashes"].write(hashes)
        for key, values in self.columns.items():  # shortened at once: a record may hold a whole page beside its text
            values += (plain_value(batch.origins[place].fields[key]) for place in kept)
        if len(kept) < lengths.size:
            counts.dropped[NO_TOKENS] += lengths.size - len(kept)
        counts.documents, counts.tokens = len(kept), ids.size
        counts.unknown_tokens = int(np.count_nonzero(ids == self._unknown))
        counts.repaired_documents, counts.utf8_bytes = batch.repaired, batch.utf8_bytes
        return counts

    def _reject(self, record: Rejected) -> None:
        job = self._job
        entry: dict[str, Any] = {"file": job.input_name, job.chunk.unit: record.number}
        entry |= {"reason": record.reason, "detail": record.detail}
        try:
            entry["raw"] = record.raw.decode()
        except UnicodeDecodeError:
            entry["raw_base64"] = base64.b64encode(record.raw).decode()
        self._files["rejects"].write(reject_line(entry))
        self.first_error = self.first_error or record.describe(job.chunk, job.input_name)


# Loaded once in a process: a worker meets the same tokenizer in every task, and a fast back end remembers the words
# that it has seen.
_loaded: dict[tuple[str, bool], tuple[Tokenizer, Encoder]] = {}  # by fingerprint, and whether it is the reference


def remember(tokenizer: Tokenizer, encoder: Encoder) -> None:
    """Keep a tokenizer that this process has loaded, for its jobs."""
    _loaded[tokenizer.fingerprint, encoder.is_reference] = tokenizer, encoder


def _load(settings: ChunkSettings) -> tuple[Tokenizer, Encoder]:
    key = settings.fingerprint, settings.backend == "reference"
    if key not in _loaded:
        tokenizer = load_tokenizer(settings.tokenizer_model, tokenizer_type=settings.tokenizer_type)
        if tokenizer.fingerprint != settings.fingerprint:
            raise DataError(
                f"--tokenizer-model {settings.tokenizer_model} has changed since the run started; start again"
            )
        _loaded[key] = tokenizer, open_encoder(tokenizer, settings.backend, probe=False)
    return _loaded[key]
