"""What one worker does: one part of a shard becomes token ids, lengths and rejects, in files that count once complete.

Memory: one batch of about 1 MB of text and its ids, for any size of the part.
"""

import base64
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import token_dtype
from megatron_neobert.data.preprocessing.part_records import (
    Counts,
    Kind,
    PartDamage,
    PartProgress,
    PartResult,
    PartTask,
    TaskSettings,
    error_record,
    files_sha256,
)
from megatron_neobert.data.shards.find import shard_sha256, shard_version
from megatron_neobert.data.shards.parts import read_part
from megatron_neobert.data.shards.records import RecordBatch, Rejected
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch, Encoder, open_encoder
from megatron_neobert.data.tokenizer.tokenizer import EncodedBatch, Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError, NeoBERTError
from megatron_neobert.runtime.atomic_files import own_name, replace_file

NO_TOKENS = "no tokens"  # a text of control characters only
TOO_FEW_TOKENS = "shorter than --min-tokens"
TOO_MANY_TOKENS = "longer than --max-tokens"

HASH_BYTES = 16  # blake2b of a document's text; of 10^9 different texts, two are taken for equal once in 10^20 runs
Report = Callable[[PartProgress], None]


class _Damaged(Exception):
    """The shard, and not our work, is why a part cannot be done."""


def tokenize_part(task: PartTask, report: Report) -> PartResult | PartDamage:
    """Writes the files of a task; a fast back end that differs from the reference tokenizer is replaced by it.

    Raises:
        DataError: A record is in error and --on-error is fail, or the tokenizer has changed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores, not threads
    settings = task.settings
    tokenizer = _tokenizer(settings)
    try:
        try:
            return _tokenize_with(_encoder(tokenizer, settings.backend), task, tokenizer, report, mismatch=None)
        except BackendMismatch as mismatch:
            return _tokenize_with(_encoder(tokenizer, "reference"), task, tokenizer, report, mismatch=str(mismatch))
    except _Damaged as damaged:
        damage = PartDamage(task.number, task.shard, str(damaged))
        replace_file(task.damage_record, json.dumps(vars(damage)), sync=False)
        return damage


def _tokenize_with(
    encoder: Encoder, task: PartTask, tokenizer: Tokenizer, report: Report, *, mismatch: str | None
) -> PartResult:
    counts, numbers = Counts(), 0
    encoder.start_part()
    with ExitStack() as stack:
        # Names of this process's own: a worker that everybody thought dead may be at the same part.
        growing = {kind: own_name(task.file(kind)) for kind in task.kinds}
        streams = {kind: stack.enter_context(file.open("wb")) for kind, file in growing.items()}
        for file in growing.values():
            stack.callback(file.unlink, missing_ok=True)
        part = _PartFiles(task, tokenizer, streams)
        for batch in _read_batches(task):
            counts.add(part.add(batch, encoder))
            numbers += batch.numbers
            report(PartProgress(task.number, counts, batch.progress, part.first_error))
        if shard_version(task.part.path) != task.shard:
            raise _Damaged(f"{task} has changed since the run started; start again with --resume, which reads it anew")
        for stream in streams.values():
            stream.flush()
        file_bytes = {str(kind): stream.tell() for kind, stream in streams.items()}
        checksum = files_sha256({str(kind): file for kind, file in growing.items()})
        if checksum is None:
            for stream in streams.values():
                os.fsync(stream.fileno())
        for kind, file in growing.items():
            file.replace(task.file(kind))
    result = PartResult(
        number=task.number,
        shard=task.shard,
        counts=counts,
        ids_sha256=part.ids_sha256,
        file_bytes=file_bytes,
        shard_sha256=shard_sha256(task.part.path) if task.starts_shard else None,
        numbers=numbers,
        encoder=encoder.name,
        is_reference=encoder.is_reference,
        compared=encoder.compared,
        mismatch=mismatch,
        first_error=part.first_error,
        files_sha256=checksum,
    )
    replace_file(task.record, json.dumps(vars(result) | {"counts": vars(counts)}), sync=checksum is None)
    return result


def _read_batches(task: PartTask) -> Iterator[RecordBatch]:
    try:
        yield from read_part(task.part, task.settings.read)
    except DataError as error:
        raise _Damaged(str(error).replace(task.part.path, task.shard_name)) from error


class _PartFiles:
    """The open files of a part, and what goes into them."""

    def __init__(self, task: PartTask, tokenizer: Tokenizer, streams: Mapping[Kind, IO[bytes]]) -> None:
        self.first_error: str | None = None
        self._task, self._streams = task, streams
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._unknown = tokenizer.unk_id
        self._ids_digest = hashlib.sha256()

    @property
    def ids_sha256(self) -> str:
        return self._ids_digest.hexdigest()

    def add(self, batch: RecordBatch, encoder: Encoder) -> Counts:
        for record in batch.rejected:
            self._reject(record)
        counts = Counts(rejected=Counter(record.reason for record in batch.rejected), dropped=Counter(batch.dropped))
        if not batch.texts:
            return counts
        encoded, kept, dropped = _keep(encoder.encode_batch(batch.texts), self._task.settings)
        ids = encoded.ids.astype(self._dtype, copy=False).tobytes()
        self._ids_digest.update(ids)
        self._streams["ids"].write(ids)
        self._streams["lengths"].write(encoded.lengths.astype("<i4", copy=False).tobytes())
        if self._task.settings.with_hashes:
            self._streams["hashes"].write(b"".join(_hash(batch.texts[place]) for place in kept))
        counts.dropped.update(dropped)
        counts.documents, counts.tokens = encoded.lengths.size, encoded.ids.size
        counts.unknown_tokens = int(np.count_nonzero(encoded.ids == self._unknown))
        counts.repaired_documents, counts.utf8_bytes = batch.repaired, batch.utf8_bytes
        return counts

    def _reject(self, record: Rejected) -> None:
        task = self._task
        entry: dict[str, Any] = {"file": task.shard_name, task.part.unit: record.number}
        entry |= {"reason": record.reason, "detail": record.detail}
        try:
            entry["raw"] = record.raw.decode()
        except UnicodeDecodeError:
            entry["raw_base64"] = base64.b64encode(record.raw).decode()
        self._streams["rejects"].write(_json_line(entry))
        where = f"{task.shard_name}, {task.part.unit} {record.number}"
        if task.part.numbers_are_relative:
            where += f" after byte {task.part.start}"
        self.first_error = self.first_error or f"{where}: {record.reason} ({record.detail})"
        if task.settings.on_error == "fail":
            raise error_record(self.first_error)


def absolute_rejects(source: Path, target: Path, *, unit: str, before: int) -> None:
    """Copies rejects of a part, with record numbers counted from the shard's beginning: `before` came earlier."""
    with source.open("rb") as lines, target.open("wb") as stream:
        for line in lines:
            entry = json.loads(line)
            entry[unit] += before
            stream.write(_json_line(entry))


def _json_line(entry: dict[str, Any]) -> bytes:
    """Readable, but for lone surrogates (of file names, of keys), which become the escapes that JSON has for them."""
    return json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _keep(
    encoded: EncodedBatch, settings: TaskSettings
) -> tuple[EncodedBatch, NDArray[np.int64] | range, Counter[str]]:
    """What is left of a batch, which texts these are, and how many documents each filter has taken."""
    lengths = encoded.lengths
    longest = np.iinfo(np.int32).max if settings.max_tokens is None else settings.max_tokens
    if lengths.min() >= max(1, settings.min_tokens) and lengths.max() <= longest:
        return encoded, range(lengths.size), Counter()
    empty = lengths == 0
    short, long = (lengths < settings.min_tokens) & ~empty, lengths > longest
    keep = ~(empty | short | long)
    ids = encoded.ids[np.repeat(keep, lengths)]
    taken = {NO_TOKENS: empty, TOO_FEW_TOKENS: short, TOO_MANY_TOKENS: long}
    dropped = Counter({name: int(mask.sum()) for name, mask in taken.items() if mask.any()})
    return EncodedBatch(ids, lengths[keep]), np.flatnonzero(keep), dropped


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest()


# Loaded once in a process: a worker meets the same tokenizer in every task, and a fast back end remembers the words
# that it has seen.
_tokenizers: dict[str, Tokenizer] = {}
_encoders: dict[tuple[str, str], Encoder] = {}


def remember(tokenizer: Tokenizer, encoder: Encoder) -> None:
    """Spares this process the loading of what it has loaded already."""
    _tokenizers[tokenizer.fingerprint] = tokenizer
    _encoders[tokenizer.fingerprint, "reference" if encoder.is_reference else "fast"] = encoder


def load_early(path: str, tokenizer_type: str, backend: Literal["auto", "fast", "reference"]) -> None:
    """Loads in a worker what its first task will probably need. What goes wrong is reported by the parent, once."""
    with suppress(NeoBERTError, OSError):
        tokenizer = load_tokenizer(path, tokenizer_type=tokenizer_type)
        remember(tokenizer, open_encoder(tokenizer, backend, probe=False))
        import pyarrow.parquet  # noqa: F401


def _tokenizer(settings: TaskSettings) -> Tokenizer:
    if settings.fingerprint not in _tokenizers:
        tokenizer = load_tokenizer(settings.tokenizer_model, tokenizer_type=settings.tokenizer_type)
        if tokenizer.fingerprint != settings.fingerprint:
            raise DataError(
                f"--tokenizer-model {settings.tokenizer_model} has changed since the run started; start again"
            )
        _tokenizers[tokenizer.fingerprint] = tokenizer
    return _tokenizers[settings.fingerprint]


def _encoder(tokenizer: Tokenizer, backend: Literal["auto", "fast", "reference"]) -> Encoder:
    key = (tokenizer.fingerprint, "reference" if backend == "reference" else "fast")
    if key not in _encoders:
        _encoders[key] = open_encoder(tokenizer, backend, probe=False)
    return _encoders[key]
