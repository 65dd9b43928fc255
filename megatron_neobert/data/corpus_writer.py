"""Writing of a corpus: nothing appears under a final name before everything is complete and on disk.

Memory stays constant: lengths wait in a file, and the index is computed from them in chunks.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from megatron_neobert import __version__
from megatron_neobert.data.corpus_format import (
    DTYPES,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    CorpusFiles,
    FileRecord,
    Manifest,
    token_dtype,
    write_manifest,
)
from megatron_neobert.data.tokenizer import Tokenizer
from megatron_neobert.errors import OutputError
from megatron_neobert.files import sync_to_disk

_CHUNK = 1 << 20  # documents or bytes handled at a time


class CorpusWriter:
    """Joins parts that workers wrote to one corpus; a context manager.

    Works in the folder PREFIX.partial, where workers put their files too, and which is removed on leaving.

    Raises:
        OutputError: The corpus exists and `overwrite` is false, the folder cannot be created, or another run holds it.
    """

    def __init__(self, files: CorpusFiles, tokenizer: Tokenizer, *, overwrite: bool) -> None:
        self.files = files
        self.folder = self.files.partial
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.documents = self.tokens = 0
        self._tokenizer = tokenizer
        refuse_existing(self.files, overwrite=overwrite)

    def __enter__(self) -> "CorpusWriter":
        self._lock = _claim(self.folder)
        self._ids = _HashedFile(self.folder / "ids")
        self._lengths = (self.folder / "lengths").open("wb")
        self._rejects = (self.folder / "rejects").open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for stream in (self._ids.stream, self._lengths, self._rejects):
            with suppress(OSError):  # closing an unfinished file may fail on a full disk; it is gone anyway
                stream.close()
        self._lock.close()

    def append_part(self, ids: Path, lengths: Path, rejects: Path) -> None:
        """Adds what one worker wrote, and removes its files.

        Args:
            ids: Documents end to end, in `dtype`.
            lengths: Tokens of each document, int32.
            rejects: JSON lines about records that are not in the corpus.
        """
        self.documents += lengths.stat().st_size // 4
        self.tokens += ids.stat().st_size // self.dtype.itemsize
        with ids.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                self._ids.write(chunk)
        for source, target in ((lengths, self._lengths), (rejects, self._rejects)):
            with source.open("rb") as stream:
                shutil.copyfileobj(stream, target, _CHUNK)
        for file in (ids, lengths, rejects):
            file.unlink()

    def commit(
        self,
        *,
        inputs: dict[str, FileRecord],
        text_key: str,
        unknown_tokens: int,
        repaired_documents: int,
        rejected: dict[str, int],
    ) -> Manifest:
        """Completes the files of at least one document and moves them to their names: .bin, .idx, the manifest last."""
        index = _HashedFile(self.folder / "idx")
        self._write_index(index)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            project_version=__version__,
            inputs=inputs,
            text_key=text_key,
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            special_tokens=self._tokenizer.special_tokens,
            special_ids=list(self._tokenizer.special_ids),
            dtype=self.dtype.name,
            documents=self.documents,
            tokens=self.tokens,
            unknown_tokens=unknown_tokens,
            repaired_documents=repaired_documents,
            rejected=rejected,
            bin=self._ids.finish(),
            idx=index.finish(),
        )
        self.files.manifest.unlink(missing_ok=True)  # first: a new .bin beside an old .idx must not pass for a corpus
        sync_to_disk(self.folder.parent)
        self._rejects.flush()
        self.files.rejects.unlink(missing_ok=True)
        if rejected:
            (self.folder / "rejects").replace(self.files.rejects)
        (self.folder / "ids").replace(self.files.bin)
        (self.folder / "idx").replace(self.files.idx)
        sync_to_disk(self.folder.parent)
        write_manifest(self.files.manifest, manifest)
        return manifest

    def _write_index(self, index: "_HashedFile") -> None:
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        index.write(HEADER.pack(MAGIC, 1, code, self.documents, self.documents + 1))
        for lengths in self._length_chunks():
            index.write(lengths.tobytes())
        end = np.int64(0)
        for lengths in self._length_chunks():
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            index.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).tobytes())
            end = ends[-1]
        for first in range(0, self.documents + 1, _CHUNK):
            index.write(np.arange(first, min(first + _CHUNK, self.documents + 1), dtype="<i8").tobytes())

    def _length_chunks(self) -> Iterator[NDArray[np.int32]]:
        self._lengths.flush()
        lengths = np.memmap(self.folder / "lengths", dtype="<i4", mode="r") if self.documents else np.zeros(0, "<i4")
        return (lengths[first : first + _CHUNK] for first in range(0, self.documents, _CHUNK))


class _HashedFile:
    """A new file whose size and sha256 are known when it is finished."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        self.stream.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> FileRecord:
        """Brings the content to disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        return FileRecord(self._bytes, self._digest.hexdigest())


def refuse_existing(files: CorpusFiles, *, overwrite: bool) -> None:
    """Raises OutputError where a corpus, or a piece of one, would be replaced unasked."""
    existing = [str(file) for file in (files.bin, files.idx, files.manifest) if file.exists()]
    if existing and not overwrite:
        raise OutputError(
            f"{' and '.join(existing)} exist{'s' if len(existing) == 1 else ''} already; "
            "choose another --output-prefix, or replace with --overwrite"
        )


def _claim(folder: Path) -> IO[bytes]:
    """Creates an empty folder for this run alone; the lock lasts as long as the returned file is open."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("wb")
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created ({error.strerror}); choose another --output-prefix") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise OutputError(
            f"{folder} belongs to a run that is still going; wait for it or choose another prefix"
        ) from error
    except OSError:
        pass  # a file system without locks: two runs with one prefix are then not told apart
    for leftover in folder.iterdir():  # of a run that was killed
        if leftover.name != "lock":
            leftover.unlink()
    return lock
