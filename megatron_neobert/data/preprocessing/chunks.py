"""Tokenize one chunk of an input file: write its token ids, lengths, attributes and rejects."""

import base64
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_neobert.data.corpus.attribute_columns import pack_columns, plain_value
from megatron_neobert.data.corpus.format import (
    NO_TOKENS,
    Counts,
    token_dtype,
)
from megatron_neobert.data.corpus.writer import TokenizedChunk
from megatron_neobert.data.inputs.find import InputVersion, input_version
from megatron_neobert.data.inputs.input_reader import Chunk, is_url
from megatron_neobert.data.inputs.recognise import read_chunk
from megatron_neobert.data.inputs.records import ReadSettings, RecordBatch, Rejected
from megatron_neobert.data.preprocessing.filters import FilterSource, apply_filters
from megatron_neobert.data.tokenizer.fast_backends import Backend, BackendMismatch, Encoder, open_encoder
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.runtime.jobs import Finished, Job, run_job
from megatron_neobert.runtime.new_file import NewFile

# Encoders of this process, by fingerprint and `is_reference`. All jobs of a run share an encoder, because loading takes
# up to half a second and a fast back end caches the words of earlier jobs.
loaded_encoders: dict[tuple[str, bool], Encoder] = {}


class DamagedInput(DataError):
    """The input file is damaged or has changed."""


@dataclass(frozen=True)
class TokenizeJob(Job[TokenizedChunk]):
    """Tokenize one chunk. `TokenizedChunk` describes its files.

    Memory: about 1 MB of text with its ids, and the attributes of all documents of the chunk.
    """

    result_type = TokenizedChunk
    unit = "B"

    chunk: Chunk
    chunk_bytes: int  # in the input file, approximately
    version: InputVersion
    input_name: str  # see input_label
    read: ReadSettings
    tokenizer_model: str
    fingerprint: str  # of the tokenizer when the run was planned
    backend: Backend
    filters: tuple[FilterSource, ...]

    def __str__(self) -> str:
        return self.input_name

    @property
    def key(self) -> str:
        return json.dumps(self.version)

    @property
    def size(self) -> int:
        return self.chunk_bytes

    @property
    def kinds(self) -> Sequence[str]:
        return ["ids", "lengths", "rejects", *(["attributes"] if self.read.record_keys else [])]

    def work(self, files: Mapping[str, NewFile]) -> TokenizedChunk:
        """Tokenize the chunk, write its files, and return its counts and the back end.

        Raises:
            DamagedInput: The input file is damaged, or has changed since the run was planned.
            BackendMismatch: A fast back end failed, or differs from the reference tokenizer.
        """
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # worker processes use the cores, threads would compete
        encoder = self._load_encoder()
        dtype = token_dtype(encoder.tokenizer.vocab_size)
        encoder.start_chunk()
        total, first_error = Counts(), None
        columns: dict[str, list[object]] = {key: [] for key in self.read.record_keys}
        for unfiltered in self._read_batches():
            batch = apply_filters(unfiltered, self.filters, self.input_name)
            for record in batch.rejected:
                files["rejects"].write(self._format_reject(record))
                first_error = first_error or record.describe(self.chunk, self.input_name)
            try:
                ids, lengths = encoder.encode_batch(batch.texts)
            except BackendMismatch as mismatch:
                raise BackendMismatch(
                    f"{self}: {mismatch}. Start again with --tokenizer-backend reference --overwrite"
                ) from mismatch
            with_tokens = np.flatnonzero(lengths).tolist()
            files["ids"].write(ids.astype(dtype, copy=False).tobytes())
            files["lengths"].write(lengths[with_tokens].astype("<i4", copy=False).tobytes())
            # Long values are shortened here, because a field may be a whole page.
            for key, values in columns.items():
                values += (plain_value(batch.fields[index].get(key)) for index in with_tokens)
            without_tokens = [batch.texts[index] for index in np.flatnonzero(lengths == 0)]
            if without_tokens:
                batch.dropped[NO_TOKENS] += len(without_tokens)
            counts = Counts(
                documents=len(with_tokens),
                tokens=ids.size,
                unknown_tokens=int(np.count_nonzero(ids == encoder.tokenizer.unk_id)),
                utf8_bytes=batch.utf8_bytes - sum(len(text.encode()) for text in without_tokens),
                rejected=Counter(record.reason for record in batch.rejected),
                dropped=batch.dropped,
            )
            total.add(counts)
        if columns:
            files["attributes"].write(pack_columns(columns))
        if input_version(self.chunk.path) != self.version:
            raise DamagedInput(
                f"{self} has changed since the run started; start again with --resume, which reads it again"
            )
        total.sampled_characters, total.unknown_characters = encoder.sampled_characters, encoder.unknown_characters
        # The input file is hashed with its first chunk. A remote file is not transferred a second time.
        is_hashed = self.chunk.start == 0 and not is_url(self.chunk.path)
        return TokenizedChunk(
            name=self.name,
            input=self.input_name,
            input_bytes=self.version.bytes,
            input_sha256=sha256_of(Path(self.chunk.path)) if is_hashed else None,
            counts=total,
            backend=encoder.name,
            compared=encoder.compared,
            first_error=first_error,
        )

    def _read_batches(self) -> Iterator[RecordBatch]:
        try:
            yield from read_chunk(self.chunk, self.read)
        except DataError as error:
            raise DamagedInput(str(error).replace(self.chunk.path, self.input_name)) from error

    def _format_reject(self, record: Rejected) -> bytes:
        """Format a rejected record as a JSON line for the file of rejects."""
        entry: dict[str, Any] = {"file": self.input_name, self.chunk.unit: record.number}
        if self.chunk.numbers_are_relative:
            entry["after_byte"] = self.chunk.start
        entry |= {"reason": record.reason, "detail": record.detail}
        try:
            entry["raw"] = record.raw.decode()
        except UnicodeDecodeError:
            entry["raw_base64"] = base64.b64encode(record.raw).decode()
        # Lone surrogates, which names of files may have, are written as JSON escapes.
        return json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"

    def _load_encoder(self) -> Encoder:
        """Return the encoder of the run, loaded once per process. Raise DataError if the tokenizer changed."""
        key = self.fingerprint, self.backend == "reference"
        if key not in loaded_encoders:
            tokenizer = load_tokenizer(self.tokenizer_model)
            if tokenizer.fingerprint != self.fingerprint:
                raise DataError(
                    f"--tokenizer-model {self.tokenizer_model} has changed since the run started; start again"
                )
            loaded_encoders[key] = open_encoder(tokenizer, self.backend, probe=False)
        return loaded_encoders[key]


def tokenize_chunk(job: TokenizeJob) -> Finished[TokenizedChunk] | str:
    """Run a job, and return its record. If the input is damaged, return the reason, so that other jobs continue."""
    try:
        return run_job(job)
    except DamagedInput as damage:
        return str(damage)
