"""Near-duplicates of finished corpora, in three stages: signatures, pairs, and one drop list of all corpora.

Signatures are computed chunk by chunk: one key per document and band, sorted by key. The documents whose keys are in
one range are therefore one slice of each chunk. Documents of equal key are compared by their n-grams of token ids,
range by range and band by band. Similar pairs are joined to clusters, and the first document of each cluster is kept.
Documents are numbered through all corpora in the given order.

The result is the same for any number of workers and any size of a range. Finished chunks and ranges are kept
in OUTPUT.partial, as in preprocessing.

Disk: 12 bytes per band of each document, 168 by default. Memory of a worker: 0.5 kB for each document of a chunk, 2^18
of them, and 80 bytes for each document of a range, and of those that share one key, which no range divides. At the
end: 5 bytes per document, 20 per duplicate.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_neobert import __version__
from megatron_neobert.cli import option
from megatron_neobert.data.corpus.drop_list import DroppedOf, read_drop_list, write_drop_list
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.volumes import read_chunks
from megatron_neobert.data.deduplication.minhash import MinHashSettings, band_keys, jaccard, minima, shingles
from megatron_neobert.errors import ConfigError, DataError, MissingInputError, OutputError
from megatron_neobert.runtime.jobs import Job, JobFolder, finish_jobs
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import parse_json, percent

CHUNK_DOCUMENTS = 1 << 18  # what a kill makes a worker do again
BUCKET_DOCUMENTS = 12_000_000  # whose keys of one band are compared at a time, with 80 bytes of memory each
_BATCH_TOKENS = 1 << 16  # at a time, in the second-level cache: measured the fastest; a longer document is read whole
_PAIRS_AT_ONCE = 1 << 17  # whose lengths are looked up together: 40 MB
_JOINED_AT_ONCE = 1 << 20  # documents
_PAIR = np.dtype("<i8")


@dataclass(frozen=True)
class FindSettings:
    """Settings of `neobert find-duplicates`, and its command line."""

    prefixes: tuple[str, ...] = option(
        help="path of a corpus without .bin; of duplicates the document in the earlier corpus stays",
        positional=True,
        metavar="PREFIX",
    )
    output: Path = option(help="the drop list, one for all of these corpora", metavar="FILE")
    minhash: MinHashSettings = field(default_factory=MinHashSettings)
    executor: Literal["local", "ray"] = option("local", "where the work runs")
    ray_address: str | None = option(None, "host:port of a cluster (RAY_ADDRESS; at first: a new one)")
    workers: int | None = option(None, "processes, one core each (1; with Ray as many as it has CPUs)", minimum=1)
    resume: bool = option(False, "keep what an earlier run of the same command has finished")
    overwrite: bool = option(False, "replace an existing list, and what another run has begun")


def print_duplicates(options: FindSettings) -> None:
    """Find near-duplicates in finished corpora, and list which of their documents training is to leave out.

    Of documents that are alike the first one stays. Training reads the list with --data-path PREFIX:drop=FILE; nothing
    is copied.
    """
    if options.resume and is_complete(options):
        _job_folder(options).sweep()
        print(f"{options.output} is complete; nothing to do")
        return
    for entry in find_duplicates(options):
        print(
            f"{entry.prefix}: {entry.dropped_documents:,} of {entry.documents:,} documents dropped "
            f"({percent(entry.dropped_documents / entry.documents, digits=2)}), with "
            f"{percent(entry.dropped_tokens / entry.tokens, digits=2)} of the tokens"
        )
    print(f"wrote {options.output}")


@dataclass(frozen=True)
class Documents:
    """All documents of the corpora that are compared, and how they are cut into chunks.

    Numbers count through all corpora.
    """

    prefixes: tuple[str, ...]
    sha256: tuple[str, ...]  # of each corpus, from its manifest
    sizes: tuple[int, ...]  # documents of each corpus
    chunk_documents: int
    minhash: MinHashSettings

    def __len__(self) -> int:
        return sum(self.sizes)

    @cached_property
    def chunks(self) -> list[range]:
        """The numbers of each chunk; a chunk belongs to one corpus."""
        bounds = [0, *accumulate(self.sizes)]
        step = self.chunk_documents
        return [range(at, min(at + step, end)) for start, end in pairwise(bounds) for at in range(start, end, step)]

    def by_corpus(self, numbers: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], Corpus, NDArray[np.int64]]]:
        """Yield the places of each corpus' documents as a mask, the corpus, and the documents' numbers in it."""
        bounds = np.append(0, np.cumsum(self.sizes))
        corpus_of = np.searchsorted(bounds, numbers, side="right") - 1
        for place in np.unique(corpus_of).tolist():
            own = corpus_of == place
            yield own, open_corpus(self.prefixes[place], self.sha256[place]), numbers[own] - bounds[place]


@dataclass(frozen=True)
class SignatureJob(Job[None]):
    """Keys of the documents of one chunk."""

    result_type = None
    sync = True
    kinds = ("keys",)

    documents: Documents
    numbers: range

    def work(self, files: Mapping[str, NewFile]) -> None:
        """Write the sorted keys of each band, and then in this order the documents, counted from the chunk's first."""
        minhash = self.documents.minhash
        ((_, corpus, in_corpus),) = self.documents.by_corpus(np.arange(self.numbers.start, self.numbers.stop))
        lengths = corpus.lengths[in_corpus]
        keys = np.empty((minhash.bands, len(lengths)), dtype=np.uint64)
        for some in _batches(lengths):
            own, numbers = lengths[some], in_corpus[some]
            ids = corpus.gather(numbers, np.zeros_like(numbers), own.astype(np.int64))
            keys[:, some] = band_keys(minima(ids, own, minhash), minhash.rows)
        for key in keys:
            order = np.argsort(key, kind="stable")
            files["keys"].write(key[order].astype("<u8").data)
            files["keys"].write(order.astype("<u4").data)

    def read_keys(self, band: int, low: int, high: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Keys of a band that are at least `low` and below `high`, sorted, and their documents in all corpora."""
        count = len(self.numbers)
        at = band * count * 12
        keys: NDArray[np.uint64] = np.memmap(self.file("keys"), "<u8", "r", at, count)
        order: NDArray[np.uint32] = np.memmap(self.file("keys"), "<u4", "r", at + 8 * count, count)
        begin = int(np.searchsorted(keys, np.uint64(low)))
        end = count if high == 2**64 else int(np.searchsorted(keys, np.uint64(high)))
        return np.array(keys[begin:end]), self.numbers.start + order[begin:end].astype(np.int64)


@dataclass(frozen=True)
class PairJob(Job[None]):
    """Pairs of documents that are alike, out of those whose key of one band lies in one range."""

    result_type = None
    sync = True
    kinds = ("pairs",)

    documents: Documents
    band: int
    bucket: int
    buckets: int

    def work(self, files: Mapping[str, NewFile]) -> None:
        """Compare each document with the first and with the previous document that share its key.

        All pairs of n documents would be n^2 / 2, and one text may occur a million times. What neither of the two is
        like may still be found in another band.
        """
        low, high = (number * 2**64 // self.buckets for number in (self.bucket, self.bucket + 1))
        chunks = signature_jobs(self.folder, self.documents)
        columns = [chunk.read_keys(self.band, low, high) for chunk in chunks]
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
        for first in range(0, len(pairs), _PAIRS_AT_ONCE):
            some = pairs[first : first + _PAIRS_AT_ONCE]
            lengths = np.empty(some.shape, dtype=np.int64)
            for own, corpus, numbers in self.documents.by_corpus(some):
                lengths[own] = corpus.lengths[numbers]
            for batch in _batches(lengths.sum(axis=1)):
                alike = self._are_alike(some[batch])
                files["pairs"].write(some[batch][alike].astype(_PAIR).tobytes())

    def _are_alike(self, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Compare the exact Jaccard index of each pair with the threshold.

        Cost: 2 us of one core for a pair of equal documents, 0.1 us per token of both for any other pair.
        """
        documents, places = np.unique(pairs.ravel(), return_inverse=True)
        contents: list[bytes] = []  # of the documents, which are sorted, so those of a corpus follow each other
        for _, corpus, numbers in self.documents.by_corpus(documents):
            lengths = corpus.lengths[numbers].astype(np.int64)
            ids = corpus.gather(numbers, np.zeros_like(numbers), lengths).astype("<u4").tobytes()
            ends = (4 * np.cumsum(lengths)).tolist()
            contents += [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        minhash = self.documents.minhash
        sets = lru_cache(maxsize=2)(lambda place: shingles(contents[place], minhash.ngram))  # neighbours share one

        def are_alike(one: int, other: int) -> bool:
            same = contents[one] == contents[other]
            return same or jaccard(sets(one), sets(other)) >= minhash.threshold

        return np.array([are_alike(one, other) for one, other in places.reshape(-1, 2).tolist()], dtype=np.bool_)


def signature_jobs(folder: Path, documents: Documents) -> list[SignatureJob]:
    """Return one job per chunk."""
    return [SignatureJob(folder, f"signatures-{chunk.start}", documents, chunk) for chunk in documents.chunks]


def find_duplicates(settings: FindSettings) -> list[DroppedOf]:
    """Find near-duplicates and write the drop list; what a killed call has finished is not done again.

    Returns:
        The entries of the drop list, one per corpus.

    Raises:
        ConfigError: The settings contradict themselves or those of the call to be continued.
        OutputError: The output, or work of another call, exists, and the settings neither resume nor overwrite.
        MissingInputError: A corpus is missing.
        DataError: A corpus is damaged, or of another tokenizer than the first.
        ChildProcessError: A worker process died.
    """
    if not 0 < settings.minhash.threshold <= 1:
        raise ConfigError(
            f"--threshold {settings.minhash.threshold} is not above 0 and at most 1, as a Jaccard index is; change it."
        )
    corpora = _open_corpora(settings.prefixes)
    with _job_folder(settings) as folder:
        continued = settings.overwrite or (settings.resume and folder.has_begun)
        if settings.output.exists() and not continued:
            raise OutputError(f"--output {settings.output} exists already; choose another, or replace with --overwrite")
        documents = Documents(
            prefixes=tuple(str(Path(prefix).absolute()) for prefix in settings.prefixes),
            sha256=tuple(corpus.manifest.documents_sha256 for corpus in corpora),
            sizes=tuple(map(len, corpora)),
            chunk_documents=CHUNK_DOCUMENTS,
            minhash=settings.minhash,
        )
        decisive = {
            "corpora": documents.sha256,
            "settings": asdict(settings.minhash),
            "documents of a chunk": CHUNK_DOCUMENTS,
            "version": __version__,
        }
        folder.begin(decisive, resume=settings.resume, overwrite=settings.overwrite)
        _do(signature_jobs(folder.path, documents), settings, "signatures")
        buckets = -(-len(documents) // BUCKET_DOCUMENTS)
        pairs = [
            PairJob(folder.path, f"pairs-{band}-{bucket}-of-{buckets}", documents, band, bucket, buckets)
            for band in range(settings.minhash.bands)
            for bucket in range(buckets)
        ]
        _do(pairs, settings, "pairs")
        entries = _write(settings, corpora, join(len(documents), [job.file("pairs") for job in pairs]))
        folder.remove()
    return entries


def is_complete(settings: FindSettings) -> bool:
    """Return True if the list of these corpora and settings exists, whole, so that --resume has nothing left to do."""
    if _job_folder(settings).has_begun:
        return False
    corpora = _open_corpora(settings.prefixes)
    try:
        for corpus in corpora:
            read_drop_list(settings.output, corpus.manifest, corpus.prefix)
    except (MissingInputError, DataError):
        return False
    with settings.output.open("rb") as stream:
        header = parse_json(stream.readline())
    in_order = [entry["documents_sha256"] for entry in header["corpora"]]
    is_same = all(header.get(name) == value for name, value in asdict(settings.minhash).items())
    return is_same and in_order == [corpus.manifest.documents_sha256 for corpus in corpora]


def _job_folder(settings: FindSettings) -> JobFolder:
    """Return OUTPUT.partial, not yet entered, by an absolute path: workers have other folders."""
    return JobFolder(settings.output.absolute().with_name(f"{settings.output.name}.partial"))


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


def _do(jobs: Sequence[Job[None]], settings: FindSettings, label: str) -> None:
    """Do the jobs that are not finished."""
    results = finish_jobs(
        jobs, label=label, workers=settings.workers, executor=settings.executor, ray_address=settings.ray_address
    )
    with closing(results):
        deque(results, maxlen=0)


@cache  # a worker has many chunks of one corpus
def open_corpus(prefix: str, documents_sha256: str) -> Corpus:
    """Open a corpus. Raise DataError if it is not the one that the run began with."""
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


def _write(settings: FindSettings, corpora: Sequence[Corpus], clusters: NDArray[np.integer]) -> list[DroppedOf]:
    """Write the drop list, and return its entries."""
    dropped = np.empty(len(clusters), dtype=np.bool_)
    for first in range(0, len(clusters), _JOINED_AT_ONCE):
        some = slice(first, first + _JOINED_AT_ONCE)
        dropped[some] = clusters[some] != np.arange(first, first + len(clusters[some]))
    masks, before = [], 0
    for prefix, corpus in zip(settings.prefixes, corpora, strict=True):
        own, tokens, first = dropped[before : before + len(corpus)], 0, 0
        for lengths in (volume.lengths for volume in corpus.volumes):
            tokens += int(lengths[own[first : first + len(lengths)]].sum(dtype=np.int64))
            first += len(lengths)
        masks.append((prefix, corpus.manifest, own, tokens))
        before += len(corpus)
    return write_drop_list(settings.output, masks, asdict(settings.minhash))
