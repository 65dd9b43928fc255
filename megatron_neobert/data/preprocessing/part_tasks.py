"""What one worker does: one part of a shard becomes token ids, lengths and rejects, in files that count once complete.

Memory: one batch of about 1 MB of text and its ids, for any size of the part.
"""

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import NO_TOKENS, reject_line, token_dtype
from megatron_neobert.data.corpus.sources import SOURCE_DTYPE, check_sources, source_name
from megatron_neobert.data.inputs.find import input_sha256, input_version
from megatron_neobert.data.inputs.recognise import read_chunk
from megatron_neobert.data.inputs.records import RecordBatch, Rejected
from megatron_neobert.data.inputs.stream import InputDigest
from megatron_neobert.data.preprocessing.filters import apply_filters
from megatron_neobert.data.preprocessing.job import (
    Counts,
    Kind,
    PartProgress,
    PartResult,
    PartTask,
    TaskSettings,
    error_record,
    write_result,
)
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch, Encoder, open_encoder
from megatron_neobert.data.tokenizer.tokenizer import EncodedBatch, Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError, NeoBERTError
from megatron_neobert.runtime.atomic_files import own_name

TOO_FEW_TOKENS = "shorter than --min-tokens"
TOO_MANY_TOKENS = "longer than --max-tokens"

HASH_BYTES = 16  # blake2b of a document's text; of 10^9 different texts, two are taken for equal once in 10^20 runs
Report = Callable[[PartProgress], None]


def tokenize_part(task: PartTask, report: Report) -> PartResult:
    """Writes the files of a task, and last its record.

    Raises:
        DataError: A record is in error and --on-error is fail, or the tokenizer has changed.
        BackendMismatch: A fast back end differs from the reference tokenizer.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores, not threads
    tokenizer, encoder = _load(task.settings)
    encoder.start_part()
    counts, numbers = Counts(), 0
    with ExitStack() as stack:
        files = _PartFiles(task, tokenizer, encoder, stack)
        digest = InputDigest() if task.starts_shard and task.part.end is None else None
        batches, damage = read_chunk(task.part, task.settings.read, digest), None
        while True:
            try:
                batch = next(batches, None)
            except DataError as error:  # the shard, and not our work, is why the part cannot be done
                damage = str(error).replace(task.part.path, task.shard_name)
                break
            if batch is None:
                break
            try:
                counts.add(files.add(apply_filters(batch, task.settings.filters, task.shard_name)))
            except BackendMismatch as mismatch:
                raise BackendMismatch(f"{task}: {mismatch}") from mismatch
            numbers += batch.numbers
            report(PartProgress(task.number, counts, batch.progress, files.first_error))
        if damage is None and input_version(task.part.path) != task.shard:
            damage = f"{task} has changed since the run started; start again with --resume, which reads it anew"
        if damage is not None:
            result = PartResult(task.number, task.shard, damage)
        else:
            whole_sha256 = digest.of_all(task.shard.bytes) if digest else None
            if task.starts_shard and whole_sha256 is None:  # not all of its bytes have passed by: they are read again
                whole_sha256 = input_sha256(task.part.path)
            result = PartResult(
                number=task.number,
                shard=task.shard,
                counts=counts,
                sha256=files.finish(),
                input_sha256=whole_sha256,
                numbers=numbers,
                encoder=encoder.name,
                is_reference=encoder.is_reference,
                compared=encoder.compared,
                first_error=files.first_error,
                sources=[*files.sources],
            )
    write_result(task, result)
    return result


class _PartFiles:
    """The open files of a part, and what goes into them."""

    def __init__(self, task: PartTask, tokenizer: Tokenizer, encoder: Encoder, stack: ExitStack) -> None:
        self.first_error: str | None = None
        self.sources: dict[str, int] = {}  # number by value of --source-key
        self._task, self._encoder = task, encoder
        self._dtype, self._unknown = token_dtype(tokenizer.vocab_size), tokenizer.unk_id
        # Names of this process's own: a worker that everybody thought dead may be at the same part.
        self._growing = {kind: own_name(task.file(kind)) for kind in task.kinds}
        self._streams: dict[Kind, IO[bytes]] = {}
        self._digests = {kind: hashlib.sha256() for kind in task.kinds}
        for kind, file in self._growing.items():
            self._streams[kind] = stack.enter_context(file.open("wb"))
            stack.callback(file.unlink, missing_ok=True)

    def add(self, batch: RecordBatch) -> Counts:
        for record in batch.rejected:
            self._reject(record)
        counts = Counts(rejected=Counter(record.reason for record in batch.rejected), dropped=batch.dropped)
        if not batch.texts:
            return counts
        encoded, kept, dropped = _keep(self._encoder.encode_batch(batch.texts), self._task.settings)
        self._write("ids", encoded.ids.astype(self._dtype, copy=False).tobytes())
        self._write("lengths", encoded.lengths.astype("<i4", copy=False).tobytes())
        if self._task.settings.with_hashes:
            texts = (batch.texts[place].encode() for place in kept)
            self._write("hashes", b"".join(hashlib.blake2b(text, digest_size=HASH_BYTES).digest() for text in texts))
        if (key := self._task.settings.read.source_key) is not None:
            names = [source_name(batch.origins[place].fields[key], key) for place in kept]
            numbers = [self.sources.setdefault(name, len(self.sources)) for name in names]
            check_sources(self.sources, key)
            self._write("sources", np.array(numbers, dtype=SOURCE_DTYPE).tobytes())
        counts.dropped.update(dropped)
        counts.documents, counts.tokens = encoded.lengths.size, encoded.ids.size
        counts.unknown_tokens = int(np.count_nonzero(encoded.ids == self._unknown))
        counts.repaired_documents, counts.utf8_bytes = batch.repaired, batch.utf8_bytes
        return counts

    def finish(self) -> dict[str, str]:
        """Gives the files their names; the sha256 of each, by kind."""
        for kind, stream in self._streams.items():
            stream.close()
            self._growing[kind].replace(self._task.file(kind))
        return {str(kind): digest.hexdigest() for kind, digest in self._digests.items()}

    def _write(self, kind: Kind, content: bytes) -> None:
        self._streams[kind].write(content)
        self._digests[kind].update(content)

    def _reject(self, record: Rejected) -> None:
        task = self._task
        entry: dict[str, Any] = {"file": task.shard_name, task.part.unit: record.number}
        entry |= {"reason": record.reason, "detail": record.detail}
        try:
            entry["raw"] = record.raw.decode()
        except UnicodeDecodeError:
            entry["raw_base64"] = base64.b64encode(record.raw).decode()
        self._write("rejects", reject_line(entry))
        self.first_error = self.first_error or record.describe(task.part, task.shard_name)
        if task.settings.on_error == "fail":
            raise error_record(self.first_error)


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


# Loaded once in a process: a worker meets the same tokenizer in every task, and a fast back end remembers the words
# that it has seen.
_loaded: dict[tuple[str, bool], tuple[Tokenizer, Encoder]] = {}  # by fingerprint, and whether it is the reference


def remember(tokenizer: Tokenizer, encoder: Encoder) -> None:
    """Spares this process the loading of what it has loaded already."""
    _loaded[tokenizer.fingerprint, encoder.is_reference] = tokenizer, encoder


def load_early(path: str, tokenizer_type: str, backend: Literal["auto", "fast", "reference"]) -> None:
    """Loads in a worker what its first task will probably need. What goes wrong is reported by the parent, once."""
    with suppress(NeoBERTError, OSError):
        tokenizer = load_tokenizer(path, tokenizer_type=tokenizer_type)
        remember(tokenizer, open_encoder(tokenizer, backend, probe=False))
        import pyarrow.parquet  # noqa: F401


def _load(settings: TaskSettings) -> tuple[Tokenizer, Encoder]:
    key = settings.fingerprint, settings.backend == "reference"
    if key not in _loaded:
        tokenizer = load_tokenizer(settings.tokenizer_model, tokenizer_type=settings.tokenizer_type)
        if tokenizer.fingerprint != settings.fingerprint:
            raise DataError(
                f"--tokenizer-model {settings.tokenizer_model} has changed since the run started; start again"
            )
        _loaded[key] = tokenizer, open_encoder(tokenizer, settings.backend, probe=False)
    return _loaded[key]
