"""What one worker does: one part of a shard becomes token ids, lengths and rejects in three files.

Memory: one batch of about 1 MB of text and its ids, whatever the size of the part.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Literal

import numpy as np

from megatron_neobert.data.corpus_format import FileRecord, token_dtype
from megatron_neobert.data.text_shards import EMPTY_TEXT, Document, Rejected, ShardPart, read_part
from megatron_neobert.data.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError
from megatron_neobert.files import sha256_of

NO_TOKENS = "no tokens"  # a text of control characters only
# Left out and counted like other rejects, but no sign of damage: neither --on-error nor --max-error-rate minds them.
HARMLESS = frozenset({EMPTY_TEXT, NO_TOKENS})

_BATCH_BYTES = 1 << 20  # of text
_REJECT_BYTES = 256  # what a rejected record counts for, so that a batch of nothing else ends too


@dataclass
class Counts:
    """What became of the records read so far."""

    documents: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    repaired_documents: int = 0
    utf8_bytes: int = 0  # of the text read, rejected records excluded
    rejected: Counter[str] = field(default_factory=Counter)  # records by reason

    def add(self, other: "Counts") -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.unknown_tokens += other.unknown_tokens
        self.repaired_documents += other.repaired_documents
        self.utf8_bytes += other.utf8_bytes
        self.rejected.update(other.rejected)

    @property
    def records(self) -> int:
        return self.documents + self.rejected.total()

    @property
    def errors(self) -> int:
        return sum(count for reason, count in self.rejected.items() if reason not in HARMLESS)


@dataclass(frozen=True)
class PartTask:
    """One part of a shard, and all that a worker must know to tokenise it."""

    number: int
    part: ShardPart
    tokenizer_model: str
    fingerprint: str  # of the tokenizer that the run has planned with
    text_key: str
    on_error: Literal["skip", "fail"]
    folder: Path

    def __str__(self) -> str:
        return str(self.part.path)

    def file(self, kind: Literal["ids", "lengths", "rejects"]) -> Path:
        return self.folder / f"{self.number:06d}.{kind}"


@dataclass(frozen=True)
class PartResult:
    """A finished part; its ids, lengths and rejects wait in the task's files."""

    number: int
    counts: Counts
    shard: FileRecord | None  # of the whole shard, with its first part
    first_error: str | None


def tokenize_part(task: PartTask, report: Callable[[Counts], None]) -> PartResult:
    """Writes the three files of a task. `report` gets the counts of each batch.

    Raises:
        DataError: A record is in error and the task says to fail, the shard is damaged, or the tokenizer has changed.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the cores, not threads
    tokenizer = _tokenizer(task.tokenizer_model, task.fingerprint)
    counts = Counts()
    with (
        task.file("ids").open("wb") as ids,
        task.file("lengths").open("wb") as lengths,
        task.file("rejects").open("w", encoding="utf-8") as rejects,
    ):
        part = _PartFiles(task, tokenizer, ids, lengths, rejects)
        for batch in _batches(task):
            progress = part.add(batch)
            counts.add(progress)
            report(progress)
    shard = task.part.path
    record = FileRecord(shard.stat().st_size, sha256_of(shard)) if task.part.starts_shard else None
    return PartResult(task.number, counts, record, part.first_error)


class _PartFiles:
    """The open files of a part, and what goes into them."""

    def __init__(
        self, task: PartTask, tokenizer: Tokenizer, ids: IO[bytes], lengths: IO[bytes], rejects: IO[str]
    ) -> None:
        self.first_error: str | None = None
        self._task, self._tokenizer = task, tokenizer
        self._ids, self._lengths, self._rejects = ids, lengths, rejects
        self._dtype = token_dtype(tokenizer.vocab_size)

    def add(self, batch: list[Document | Rejected]) -> Counts:
        counts = Counts()
        documents = [record for record in batch if isinstance(record, Document)]
        encoded = self._tokenizer.encode_batch([document.text for document in documents])
        lengths = dict(zip((document.position for document in documents), encoded.lengths.tolist(), strict=True))
        for record in batch:
            if isinstance(record, Document):
                counts.utf8_bytes += record.utf8_bytes
                counts.repaired_documents += record.repaired
                if lengths[record.position]:
                    continue
                record = Rejected(NO_TOKENS, record.position, f"{len(record.text)} characters")
            counts.rejected[record.reason] += 1
            self._reject(record)
        kept = encoded.lengths[encoded.lengths > 0]
        self._ids.write(encoded.ids.astype(self._dtype).tobytes())
        self._lengths.write(kept.tobytes())
        counts.documents, counts.tokens = kept.size, encoded.ids.size
        counts.unknown_tokens = int(np.count_nonzero(encoded.ids == self._tokenizer.unk_id))
        return counts

    def _reject(self, record: Rejected) -> None:
        file = str(self._task.part.path)
        entry = {"file": file, "position": record.position, "reason": record.reason, "detail": record.detail}
        self._rejects.write(json.dumps(entry, ensure_ascii=False) + "\n")
        if record.reason in HARMLESS:
            return
        problem = f"{file}, {record.position}: {record.reason} ({record.detail})"
        if self._task.on_error == "fail":
            raise DataError(f"{problem}; mend the record, or leave such records out with --on-error skip")
        self.first_error = self.first_error or problem


def _batches(task: PartTask) -> Iterator[list[Document | Rejected]]:
    batch: list[Document | Rejected] = []
    taken = 0
    for record in read_part(task.part, text_key=task.text_key):
        batch.append(record)
        taken += record.utf8_bytes if isinstance(record, Document) else _REJECT_BYTES
        if taken >= _BATCH_BYTES:
            yield batch
            batch, taken = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=1)  # a worker meets the same tokenizer in every task
def _tokenizer(path: str, fingerprint: str) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"--tokenizer-model {path} has changed since the run started; start again")
    return tokenizer
