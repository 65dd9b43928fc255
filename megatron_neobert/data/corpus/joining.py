"""Which documents of which parts become which volume, and the writing of one of them.

The layout follows from counts alone: lengths, and the fate of each document (kept, held out, a duplicate). It is the
same for any writer of the volumes and any order; each is written by itself, and its record last, so that volumes
that a killed run has finished are kept. Memory: a window of one part's documents, and a count per length that occurs.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import CorpusFiles, FileRecord, LengthCounts, Volume
from megatron_neobert.data.corpus.sources import SOURCE_DTYPE
from megatron_neobert.data.corpus.volumes import link_volume, read_chunks, write_volume
from megatron_neobert.runtime.atomic_files import replace_file, replacing, sha256_of

_WINDOW_DOCUMENTS = 1 << 18  # read at a time, and
_WINDOW_BYTES = 4 << 20  # of ids; a longer document is read whole

KEPT, HELD_OUT, DUPLICATED = 0, 1, 2  # the fate of a document

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class PartFiles:
    """What one finished part consists of, complete and on disk."""

    shard: str  # as the manifest calls it
    ids: Path  # documents end to end, in the corpus's dtype
    lengths: Path  # tokens of each document, int32
    hashes: Path  # 16 bytes of blake2b of each document's text; there only for deduplication and for a split
    rejects: Path  # JSON lines about records that are errors
    documents: int
    tokens: int
    unknown_tokens: int
    sha256: dict[str, str]  # of the ids, the lengths and, if there, the hashes and sources
    # A number for each document, uint16, and what the numbers stand for; None: sources are not counted.
    sources: tuple[Path, list[str]] | None = None
    # Under which key rejects have their numbers and what to add to those; None: they count from the shard's beginning.
    records_before: tuple[str, int] | None = None


@dataclass(frozen=True)
class OutputSettings:
    """Which documents become a corpus, and in what files."""

    files: CorpusFiles
    keep_shards: bool  # a volume per shard
    shard_bytes: int | None  # upper limit of a volume's .bin; None: no limit
    validation_fraction: float  # of the documents, chosen by their text, into a corpus of their own
    deduplicate: bool


class Piece(NamedTuple):
    """Consecutive documents of one part, of any fate."""

    part: PartFiles
    first: int
    stop: int
    begin: int  # bytes of the part's ids before them
    before: int  # documents of all parts before them


@dataclass(frozen=True)
class VolumeTask:
    """One volume, and all that a worker must know to write it as `folder / name`.bin and .idx."""

    name: str
    pieces: list[Piece]
    fate: int  # of the documents that are in it
    fates: Path | None  # a byte for each document of all parts; None: all are kept
    folder: Path
    dtype: str
    unknown_id: int
    source_names: list[str]  # what the numbers in `folder / name`.sources stand for; empty: it writes no such file

    def __str__(self) -> str:
        return f"volume {self.name} of {self.folder}"


@dataclass
class WrittenVolume:
    """A finished volume, and what its documents count for in a manifest."""

    name: str  # the task's
    volume: Volume | None = None  # None: there is no document for it
    unknown_tokens: int = 0
    lengths: LengthCounts = field(default_factory=LengthCounts)
    inputs: dict[str, Counter[str]] = field(default_factory=dict)  # documents and tokens, by shard
    sources: dict[str, Counter[str]] = field(default_factory=dict)  # the same by source
    sources_sha256: str | None = None  # of its file of their numbers

    def count(self, part: PartFiles, lengths: NDArray[np.int32], *, unknown_tokens: int) -> None:
        self.lengths.add(lengths)
        self.unknown_tokens += unknown_tokens
        counts = self.inputs.setdefault(part.shard, Counter())
        counts.update(documents=lengths.size, tokens=int(lengths.sum(dtype=np.int64)))

    def add(self, other: "WrittenVolume") -> None:
        """Counts what is in another volume of the same corpus too."""
        self.lengths.counts.update(other.lengths.counts)
        self.unknown_tokens += other.unknown_tokens
        for own, others in ((self.inputs, other.inputs), (self.sources, other.sources)):
            for name, counts in others.items():
                own.setdefault(name, Counter()).update(counts)


def lay_out(
    parts: Sequence[PartFiles], output: OutputSettings, *, item_bytes: int, fates: Path | None
) -> list[list[Piece]]:
    """The volumes in order, each with the documents that are left out between its first and its last.

    Args:
        parts: Each with a document at least.
        item_bytes: Of a token.
        fates: As in `VolumeTask`.
    """
    if output.shard_bytes is not None:
        return list(_cut_at_size(parts, fates, output.shard_bytes, item_bytes))
    volumes: list[list[Piece]] = []
    before = 0
    for _, group in groupby(parts, key=lambda part: part.shard if output.keep_shards else None):
        volumes.append([])
        for part in group:
            volumes[-1].append(Piece(part, 0, part.documents, 0, before))
            before += part.documents
    return volumes


def _cut_at_size(
    parts: Sequence[PartFiles], fates: Path | None, volume_bytes: int, item_bytes: int
) -> Iterator[list[Piece]]:
    """Volumes with as many documents as fit; a longer document is alone in its volume."""
    pieces: list[Piece] = []
    used = before = 0  # bytes in the volume, documents of all parts so far
    for part in parts:
        first = begin = at = at_byte = 0  # the piece begins at `first` and `begin`, the chunk `at` and `at_byte`
        for lengths in read_chunks(part.lengths, "<i4"):
            sizes = lengths.astype(np.int64) * item_bytes
            ends = kept_ends = np.cumsum(sizes)
            if fates is not None:
                is_kept = np.fromfile(fates, np.uint8, sizes.size, offset=before + at) == KEPT
                kept_ends = np.cumsum(sizes * is_kept)
            start = kept = 0  # documents of the chunk that have a volume, and the bytes of those that are kept
            while start < sizes.size:
                stop = int(np.searchsorted(kept_ends, kept + volume_bytes - used, side="right"))
                if stop <= start and used:  # the volume ends before this document
                    here, here_byte = at + start, at_byte + (int(ends[start - 1]) if start else 0)
                    if here > first:
                        pieces.append(Piece(part, first, here, begin, before + first))
                    yield pieces
                    pieces, used, first, begin = [], 0, here, here_byte
                    continue
                start = max(stop, start + 1)
                used, kept = used + int(kept_ends[start - 1]) - kept, int(kept_ends[start - 1])
            at, at_byte = at + sizes.size, at_byte + int(ends[-1])
        pieces.append(Piece(part, first, part.documents, begin, before + first))
        before += part.documents
    if pieces:
        yield pieces


def write_volume_of(task: VolumeTask, on_bytes: OnBytes) -> WrittenVolume:
    """Writes a volume to disk, and then its record; one that is there, with its record, is compared and kept.

    Args:
        on_bytes: Called with the bytes of token ids dealt with since the last call.
    """
    known = _read_record(task)
    if known is not None:
        on_bytes(known.volume.bin.bytes if known.volume else 0)
        return known
    written, dtype = WrittenVolume(task.name), np.dtype(task.dtype)
    part = task.pieces[0].part
    if len(task.pieces) == 1 and task.pieces[0].stop - task.pieces[0].first == part.documents and _takes_all(task):
        for lengths in read_chunks(part.lengths, "<i4"):
            written.count(part, lengths, unknown_tokens=0)
        written.unknown_tokens = part.unknown_tokens
        written.volume = link_volume(task.folder / task.name, part.ids, part.lengths, dtype, sha256=part.sha256["ids"])
        on_bytes(written.volume.bin.bytes)
    else:
        documents = _documents(task, written, dtype, on_bytes)
        written.volume = write_volume(task.folder / task.name, documents, dtype)
    if task.source_names:
        file = task.folder / f"{task.name}.sources"
        with replacing(file) as temporary, temporary.open("wb") as stream:
            for piece in task.pieces:
                _write_sources(piece, task, stream, written.sources)
        written.sources_sha256 = sha256_of(file)
    volume = written.volume and asdict(written.volume)
    content = vars(written) | {"volume": volume, "lengths": list(written.lengths.counts.items())}
    replace_file(task.folder / f"{task.name}.done", json.dumps(content))
    return written


def _read_record(task: VolumeTask) -> WrittenVolume | None:
    """What an earlier call has made of a task; None where it is to be done."""
    try:
        content = json.loads((task.folder / f"{task.name}.done").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    volume: Volume | None = None
    if entry := content["volume"]:
        volume = Volume(**{**entry, "bin": FileRecord(**entry["bin"]), "idx": FileRecord(**entry["idx"])})
        for end, record in (("bin", volume.bin), ("idx", volume.idx)):
            file = task.folder / f"{task.name}.{end}"
            # A link to a part's ids is as sound as the part, which the run has compared when it took it over.
            is_part = end == "bin" and file.exists() and file.samefile(task.pieces[0].part.ids)
            if not file.exists() or not (is_part or sha256_of(file) == record.sha256):
                return None
    sources, sources_sha256 = task.folder / f"{task.name}.sources", content["sources_sha256"]
    if sources_sha256 is not None and not (sources.exists() and sha256_of(sources) == sources_sha256):
        return None
    return WrittenVolume(
        name=task.name,
        volume=volume,
        unknown_tokens=content["unknown_tokens"],
        lengths=LengthCounts(dict(content["lengths"])),
        inputs={shard: Counter(counts) for shard, counts in content["inputs"].items()},
        sources={name: Counter(counts) for name, counts in content["sources"].items()},
        sources_sha256=sources_sha256,
    )


def _takes_all(task: VolumeTask) -> bool:
    """Whether all documents of its one piece have its fate."""
    if task.fates is None:
        return True
    piece = task.pieces[0]
    return bool((np.fromfile(task.fates, np.uint8, piece.stop - piece.first, offset=piece.before) == task.fate).all())


def _write_sources(piece: Piece, task: VolumeTask, stream: IO[bytes], counts: dict[str, Counter[str]]) -> None:
    """Writes the numbers of its documents' sources among those of all parts, and counts them."""
    assert piece.part.sources is not None
    file, names = piece.part.sources
    place = {name: number for number, name in enumerate(task.source_names)}
    numbers = np.array([place[name] for name in names], dtype=SOURCE_DTYPE)
    for first in range(piece.first, piece.stop, _WINDOW_DOCUMENTS):
        size = min(_WINDOW_DOCUMENTS, piece.stop - first)
        lengths = np.fromfile(piece.part.lengths, "<i4", size, offset=4 * first)
        sources = np.fromfile(file, SOURCE_DTYPE, size, offset=SOURCE_DTYPE.itemsize * first)
        if task.fates is not None:
            fates = np.fromfile(task.fates, np.uint8, size, offset=piece.before + first - piece.first)
            lengths, sources = lengths[fates == task.fate], sources[fates == task.fate]
        stream.write(numbers[sources].data)
        documents, tokens = np.bincount(sources), np.bincount(sources, lengths)  # floats, exact below 2**53
        for number in np.flatnonzero(documents).tolist():
            new = {"documents": int(documents[number]), "tokens": int(tokens[number])}
            counts.setdefault(names[number], Counter()).update(new)


def _documents(
    task: VolumeTask, written: WrittenVolume, dtype: np.dtype[np.integer], on_bytes: OnBytes
) -> Iterator[tuple[bytes, NDArray[np.int32]]]:
    """Ids and lengths of consecutive documents of the volume."""
    for piece in task.pieces:
        for ids, lengths in _windows(piece, task, dtype.itemsize):
            unknown_tokens = int(np.count_nonzero(np.frombuffer(ids, dtype) == task.unknown_id))
            written.count(piece.part, lengths, unknown_tokens=unknown_tokens)
            yield ids, lengths
            on_bytes(len(ids))


def _windows(piece: Piece, task: VolumeTask, item_bytes: int) -> Iterator[tuple[bytes, NDArray[np.int32]]]:
    with piece.part.ids.open("rb") as ids, piece.part.lengths.open("rb") as lengths_file:
        lengths_file.seek(4 * piece.first)
        first, begin = piece.first, piece.begin
        while first < piece.stop:
            lengths = np.fromfile(lengths_file, "<i4", min(_WINDOW_DOCUMENTS, piece.stop - first))
            bounds = begin + np.append(0, np.cumsum(lengths, dtype=np.int64) * item_bytes)
            chosen = np.ones(lengths.size, dtype=np.bool_)
            if task.fates is not None:
                offset = piece.before + first - piece.first
                chosen = np.fromfile(task.fates, np.uint8, lengths.size, offset=offset) == task.fate
            start = 0
            while start < lengths.size:
                longest = int(np.searchsorted(bounds, bounds[start] + _WINDOW_BYTES, side="right")) - 1
                stop = max(start + 1, longest)
                if (some := chosen[start:stop]).any():
                    yield _read_runs(ids, bounds[start : stop + 1], some), lengths[start:stop][some]
                start = stop
            first, begin = first + lengths.size, int(bounds[-1])


def _read_runs(ids: IO[bytes], bounds: NDArray[np.int64], chosen: NDArray[np.bool_]) -> bytes:
    """The chosen documents; those that follow each other are read in one go, and no others."""
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
    runs = bounds[edges].reshape(-1, 2).tolist()
    return b"".join([os.pread(ids.fileno(), end - begin, begin) for begin, end in runs])
