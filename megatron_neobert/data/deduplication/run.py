"""Near-duplicates of finished corpora, in three stages: signatures, pairs, and one drop list of all corpora.

Signatures are computed part by part: one key per document and band, sorted by key. The documents whose keys are in one
range are therefore one slice of each part. Documents of equal key are compared by their n-grams of token ids, range by
range and band by band. Similar pairs are joined to clusters, and the first document of each cluster is kept. Documents
are numbered through all corpora in the given order.

The result is the same for any number of workers and any size of a range. Finished parts and ranges are kept in
OUTPUT.partial with their checksums, as in preprocessing.

Disk: 12 bytes per band of each document, 168 by default. Memory of a worker: 0.5 kB for each document of a part, 2^18
of them, and 80 bytes for each document of a range, and of those that share one key, which no range divides. At the
end: 5 bytes per document, 20 per duplicate.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_neobert import __version__
from megatron_neobert.data.corpus.drop_list import write_drop_list
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.volumes import read_chunks
from megatron_neobert.data.deduplication.minhash import (
    MinHashSettings,
    band_keys,
    jaccard,
    minima,
    shingles,
)
from megatron_neobert.data.preprocessing.job import JobFolder
from megatron_neobert.data.preprocessing.workers import Report, run_tasks
from megatron_neobert.errors import ConfigError, DataError, MissingInputError, OutputError
from megatron_neobert.runtime.atomic_files import replace_file, replacing, sha256_of

PART_DOCUMENTS = 1 << 18  # what a kill makes a worker do again
_BATCH_TOKENS = 1 << 20  # read at a time; a longer document, or pair, is read whole
_PAIRS_AT_ONCE = 1 << 17  # whose lengths are looked up together: 40 MB
_JOINED_AT_ONCE = 1 << 20  # documents
_PAIR = np.dtype("<i8")


@dataclass(frozen=True)
class FindSettings:
    """What `find_duplicates` is asked to do."""

    prefixes: tuple[str, ...]  # of two documents that are alike the one in the earlier corpus stays
    output: Path
    minhash: MinHashSettings = field(default_factory=MinHashSettings)
    executor: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    workers: int | None = None  # one; with Ray as many as it has room for
    bucket_documents: int = 12_000_000  # whose keys of one band are compared together, about
    shard_index: int | None = None
    num_shards: int | None = None
    merge: bool = False
    resume: bool = False
    overwrite: bool = False


@dataclass(frozen=True)
class Task(ABC):
    """A piece of work whose files, in `folder`, count when its record is there."""

    kinds: ClassVar[tuple[str, ...]]  # ends of its files
    folder: Path
    name: str
    minhash: MinHashSettings

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def write(self, report: Report) -> None: ...

    @property
    def record(self) -> Path:
        return self.folder / f"{self.name}.done"

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{kind}"

    def is_finished(self) -> bool:
        """Whether its files are there and as they were written."""
        try:
            recorded = json.loads(self.record.read_bytes())
            return all(sha256_of(self.file(kind)) == recorded[kind] for kind in self.kinds)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False


@dataclass(frozen=True)
class SignatureTask(Task):
    """Keys of some documents of a corpus."""

    kinds = ("keys",)
    prefix: str
    documents_sha256: str
    documents: range  # of the corpus
    first: int  # of all corpora

    def write(self, report: Report) -> None:
        """Keys of each band sorted, and then in this order the documents, counted from the part's first."""
        corpus = _open(self.prefix, self.documents_sha256)
        lengths = corpus.lengths[np.arange(self.documents.start, self.documents.stop)]
        keys = np.empty((self.minhash.bands, len(lengths)), dtype=np.uint64)
        for some in _batches(lengths):
            own = lengths[some]
            numbers = np.arange(self.documents.start + some.start, self.documents.start + some.stop)
            ids = corpus.gather(numbers, np.zeros_like(numbers), own.astype(np.int64))
            keys[:, some] = band_keys(minima(ids, own, self.minhash), self.minhash.rows)
            report(None)
        with replacing(self.file("keys")) as path, path.open("wb") as stream:
            for key in keys:
                order = np.argsort(key, kind="stable")
                stream.write(key[order].astype("<u8").data)
                stream.write(order.astype("<u4").data)
                report(None)

    def read_keys(self, band: int, low: int, high: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Keys of a band that are at least `low` and below `high`, sorted, and their documents in all corpora."""
        count = len(self.documents)
        at = band * count * 12
        keys: NDArray[np.uint64] = np.memmap(self.file("keys"), "<u8", "r", at, count)
        order: NDArray[np.uint32] = np.memmap(self.file("keys"), "<u4", "r", at + 8 * count, count)
        begin = int(np.searchsorted(keys, np.uint64(low)))
        end = count if high == 2**64 else int(np.searchsorted(keys, np.uint64(high)))
        return np.array(keys[begin:end]), self.first + order[begin:end].astype(np.int64)


@dataclass(frozen=True)
class PairTask(Task):
    """Pairs of documents that are alike, out of those whose key of one band lies in one range."""

    kinds = ("pairs",)
    parts: tuple[SignatureTask, ...]
    band: int
    bucket: int
    buckets: int

    def write(self, report: Report) -> None:
        """Of documents that share a key, each is compared with the first of them and with the one before it.

        All pairs of n documents would be n^2 / 2, and one text may occur a million times. What neither of the two is
        like may still be found in another band.
        """
        low, high = (number * 2**64 // self.buckets for number in (self.bucket, self.bucket + 1))
        columns = []
        for part in self.parts:
            columns.append(part.read_keys(self.band, low, high))
            report(None)
        keys, documents = (np.concatenate(column) for column in zip(*columns, strict=True))
        del columns
        order = np.argsort(keys, kind="stable")  # documents of equal keys stay in the order of the corpora
        keys, documents = keys[order], documents[order]
        again = np.flatnonzero(keys[1:] == keys[:-1]) + 1
        begins = np.ones(len(keys), dtype=np.bool_)
        begins[again] = False
        firsts = np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))[again]
        further = firsts < again - 1
        pairs = np.concatenate(
            [
                np.stack([documents[firsts], documents[again]], axis=1),
                np.stack([documents[again - 1], documents[again]], axis=1)[further],
            ]
        )
        with replacing(self.file("pairs")) as path, path.open("wb") as stream:
            for first in range(0, len(pairs), _PAIRS_AT_ONCE):
                some = pairs[first : first + _PAIRS_AT_ONCE]
                lengths = np.empty(some.shape, dtype=np.int64)
                for own, corpus, numbers in self._by_corpus(some):
                    lengths[own] = corpus.lengths[numbers]
                for batch in _batches(lengths.sum(axis=1)):
                    stream.write(some[batch][self._are_alike(some[batch])].astype(_PAIR).tobytes())
                    report(None)

    def _by_corpus(self, documents: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], Corpus, NDArray[np.int64]]]:
        """Yield the places of each corpus' documents as a mask, the corpus, and the documents' numbers in it."""
        firsts = [part for part in self.parts if part.documents.start == 0]
        corpus_of = np.searchsorted([part.first for part in firsts], documents, side="right") - 1
        for number, part in enumerate(firsts):
            own = corpus_of == number
            if own.any():
                yield own, _open(part.prefix, part.documents_sha256), documents[own] - part.first

    def _are_alike(self, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Compare the exact Jaccard index of each pair with the threshold.

        Cost: 2 us of one core for a pair of equal documents, 0.1 us per token of both for any other pair.
        """
        documents, places = np.unique(pairs.ravel(), return_inverse=True)
        contents: list[bytes] = []  # of the documents, which are sorted, so those of a corpus follow each other
        for _, corpus, numbers in self._by_corpus(documents):
            lengths = corpus.lengths[numbers].astype(np.int64)
            ids = corpus.gather(numbers, np.zeros_like(numbers), lengths).astype("<u4").tobytes()
            ends = (4 * np.cumsum(lengths)).tolist()
            contents += [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        sets = lru_cache(maxsize=2)(lambda place: shingles(contents[place], self.minhash.ngram))  # neighbours share one

        def are_alike(one: int, other: int) -> bool:
            same = contents[one] == contents[other]
            return same or jaccard(sets(one), sets(other)) >= self.minhash.threshold

        return np.array([are_alike(one, other) for one, other in places.reshape(-1, 2).tolist()], dtype=np.bool_)


def find_duplicates(settings: FindSettings, *, on_progress: Callable[[str], None]) -> dict[str, Any] | None:
    """Finds near-duplicates and writes the drop list; what a killed call has finished is not done again.

    Returns:
        The first line of the drop list; None of a task of an array, whose work waits for the others' and the merge.

    Raises:
        ConfigError: The settings contradict themselves or those of the call to be continued.
        OutputError: The output, or work of another call, is there, and the settings neither resume nor overwrite.
        MissingInputError: A corpus is missing, or work that is to be merged.
        DataError: A corpus is damaged, or of another tokenizer than the first.
        ChildProcessError: A worker process died.
    """
    corpora = _open_corpora(settings.prefixes)
    folder = settings.output.absolute().with_name(f"{settings.output.name}.partial")  # workers may stand elsewhere
    with JobFolder(folder, task=settings.shard_index) as job:
        continued = settings.overwrite or ((settings.resume or settings.merge) and job.has_begun)
        if settings.output.exists() and not continued:
            raise OutputError(f"--output {settings.output} exists already; choose another, or replace with --overwrite")
        decisive = {
            "corpora": [corpus.manifest.documents_sha256 for corpus in corpora],
            "settings": asdict(settings.minhash),
            "documents of a part": PART_DOCUMENTS,
            "version": __version__,
        }
        job.begin(decisive, resume=settings.resume, overwrite=settings.overwrite, merge=settings.merge)
        parts = _parts(settings, corpora, folder)
        documents = sum(map(len, corpora))
        if not _do(parts, settings, "signatures", on_progress):
            return None
        buckets = -(-documents // settings.bucket_documents)
        pairs = [
            PairTask(
                folder, f"pairs-{band}-{bucket}-of-{buckets}", settings.minhash, tuple(parts), band, bucket, buckets
            )
            for band in range(settings.minhash.bands)
            for bucket in range(buckets)
        ]
        if not _do(pairs, settings, "pairs", on_progress) or settings.shard_index is not None:
            return None
        clusters = join(documents, [task.file("pairs") for task in pairs])
        found = _write(settings, corpora, clusters)
        job.remove()
    return found


def join(documents: int, pair_files: Sequence[Path]) -> NDArray[np.integer]:
    """The first document of each document's cluster, by union and find over the pairs, some at a time."""
    parents = np.arange(documents, dtype=np.uint32 if documents < 2**32 else np.int64)

    def roots(some: NDArray[np.int64]) -> NDArray[np.int64]:
        while True:
            parents[some] = parents[parents[some]]  # halves the way for those who come later
            above = parents[some].astype(np.int64)
            if np.array_equal(above, some):
                return some
            some = above

    for path in pair_files:
        for chunk in read_chunks(path, _PAIR):
            one, other = chunk.reshape(-1, 2).T
            while len(one):
                one, other = roots(one), roots(other)
                apart = one != other
                one, other = one[apart], other[apart]
                # A cluster hangs from its first document; of several that one joins in this step, from the very first.
                np.minimum.at(parents, np.maximum(one, other), np.minimum(one, other).astype(parents.dtype))
    for first in range(0, documents, _JOINED_AT_ONCE):
        some = np.arange(first, min(first + _JOINED_AT_ONCE, documents))
        parents[some] = roots(some)
    return parents


def _batches(lengths: NDArray[np.integer]) -> Iterator[slice]:
    """Yield consecutive slices of at most _BATCH_TOKENS tokens each, or of one element that has more."""
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < len(lengths):
        begin = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, begin + _BATCH_TOKENS, side="right")))
        yield slice(first, stop)
        first = stop


def do_task(task: Task, report: Report) -> Task:
    """What a worker does."""
    task.record.unlink(missing_ok=True)  # of files that were found damaged
    task.write(report)
    replace_file(task.record, json.dumps({kind: sha256_of(task.file(kind)) for kind in task.kinds}))
    return task


def _do(tasks: Sequence[Task], settings: FindSettings, what: str, on_progress: Callable[[str], None]) -> bool:
    """Does those that are this call's and not finished; whether all are, also those of other tasks of the array."""
    own = tasks[settings.shard_index or 0 :: settings.num_shards or 1]
    with ThreadPoolExecutor() as threads:
        is_finished = list(threads.map(lambda task: task.is_finished(), own))
    missing = [task for task, is_done in zip(own, is_finished, strict=True) if not is_done]
    if missing and settings.merge:
        raise MissingInputError(
            f"{len(missing):,} of {len(tasks):,} {what} are not finished, the first is {missing[0].name}: run all "
            "tasks of the array once more, then merge"
        )
    finished = len(own) - len(missing)
    results = run_tasks(
        do_task, missing, workers=settings.workers, executor=settings.executor, ray_address=settings.ray_address
    )
    with closing(results):
        for _ in results:
            finished += 1
            on_progress(f"{what}: {finished:,} of {len(own):,}")
    all_finished = sum(task.record.exists() for task in tasks)
    if all_finished < len(tasks):
        on_progress(f"{what}: {all_finished:,} of {len(tasks):,} of all tasks of the array are finished")
    return all_finished == len(tasks)


def _parts(settings: FindSettings, corpora: Sequence[Corpus], folder: Path) -> list[SignatureTask]:
    parts, before = [], 0
    for prefix, corpus in zip(settings.prefixes, corpora, strict=True):
        for start in range(0, len(corpus), PART_DOCUMENTS):
            own = range(start, min(start + PART_DOCUMENTS, len(corpus)))
            sha256 = corpus.manifest.documents_sha256
            name = f"signatures-{before + start}"
            path = str(Path(prefix).absolute())
            parts.append(SignatureTask(folder, name, settings.minhash, path, sha256, own, before + start))
        before += len(corpus)
    return parts


@cache  # a worker has many parts of one corpus
def _open(prefix: str, documents_sha256: str) -> Corpus:
    corpus = Corpus(prefix)
    if corpus.manifest.documents_sha256 != documents_sha256:
        raise DataError(f"{prefix} has been written anew since this run began; start again with --overwrite")
    return corpus


def _open_corpora(prefixes: Sequence[str]) -> list[Corpus]:
    corpora = [Corpus(prefix) for prefix in prefixes]
    for place, corpus in enumerate(corpora):
        first, manifest = corpora[0].manifest, corpus.manifest
        if manifest.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise DataError(
                f"{corpus.prefix} was written with tokenizer {manifest.tokenizer_fingerprint[:12]}, but "
                f"{corpora[0].prefix} with {first.tokenizer_fingerprint[:12]}: the same ids mean other words. "
                "Preprocess both with one tokenizer"
            )
        for earlier in corpora[:place]:
            if earlier.manifest.documents_sha256 == manifest.documents_sha256:
                raise ConfigError(f"{corpus.prefix} and {earlier.prefix} are the same corpus; name it once")
    return corpora


def _write(settings: FindSettings, corpora: Sequence[Corpus], clusters: NDArray[np.integer]) -> dict[str, Any]:
    """The drop list, and its first line."""
    dropped = np.empty(len(clusters), dtype=np.bool_)
    for first in range(0, len(clusters), _JOINED_AT_ONCE):
        some = slice(first, first + _JOINED_AT_ONCE)
        dropped[some] = clusters[some] != np.arange(first, first + len(clusters[some]))
    firsts = clusters[dropped]
    firsts.sort()
    bounds = np.flatnonzero(np.diff(firsts, prepend=-1, append=-1)) if len(firsts) else np.zeros(1, dtype=np.int64)
    masks, before = [], 0
    for prefix, corpus in zip(settings.prefixes, corpora, strict=True):
        own, tokens, first = dropped[before : before + len(corpus)], 0, 0
        for lengths in (volume.lengths for volume in corpus.volumes):
            tokens += int(lengths[own[first : first + len(lengths)]].sum(dtype=np.int64))
            first += len(lengths)
        masks.append((prefix, corpus.manifest, own, tokens))
        before += len(corpus)
    found = {
        **asdict(settings.minhash),
        "clusters": len(bounds) - 1,
        "largest_cluster": int(np.diff(bounds).max(initial=0)) + 1,
    }
    entries = write_drop_list(settings.output, masks, found)
    return {**found, "corpora": [asdict(entry) for entry in entries]}
