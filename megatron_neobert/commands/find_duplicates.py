"""The command `neobert find-duplicates`: find duplicates of finished corpora in three stages, and list them.

1. Signatures: one job per range of documents computes 64-bit keys of each document, one for each band and a hash of all
   of its token ids, and sorts the documents by each key. A threshold of 1 needs the hash only.
2. Pairs: one job per key and bucket (a range of values) compares documents with equal keys by their n-grams;
   minhash.py chooses the pairs. As ranges are sorted, a bucket is one slice of each range.
3. Clusters: similar pairs are joined to clusters. The first document of a cluster stays, all others are dropped.

Documents are numbered across all corpora, in the order of the command line. The result does not depend on the number of
workers, ranges or buckets. Finished jobs are kept in OUTPUT.partial until the list is written.

Disk: 12 bytes per document and key, 180 per document by default. Memory per worker: 0.5 kB for each of the 2^18
documents of a range, or 80 bytes for each document of a bucket and 200 MB. Documents with one key are never in several
buckets. Memory of the last stage: 9 bytes per document, 12 with --add-attribute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.cli import option
from megatron_neobert.data.corpus.attributes import add_attribute, attributes_folder, is_added
from megatron_neobert.data.corpus.drop_list import DropListEntry, write_drop_list
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.shard_files import read_items
from megatron_neobert.data.deduplication.minhash import (
    MinHashSettings,
    band_keys,
    divide_families,
    find_families,
    hash_documents,
    jaccard,
    minima,
    pair_by_rare_ngrams,
    pair_neighbours,
    shingles,
)
from megatron_neobert.data.deduplication.search import (
    SearchedDocuments,
    SearchSettings,
    begin,
    is_complete,
    job_folder,
    open_corpora,
    read_steps,
    steps_of,
)
from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime.jobs import Job, JobRunner, finish_jobs
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import percent

# Documents whose keys of one band are compared in one job, with 80 bytes of memory each.
BUCKET_DOCUMENTS = 12_000_000
_STEP_PAIRS = 1 << 17  # pairs whose lengths are looked up together, with 40 MB of memory
_STEP_DOCUMENTS = 1 << 20  # documents of the last stage whose clusters are looked up together
_PAIR_DTYPE = np.dtype("<i8")


@dataclass(frozen=True, kw_only=True)
class FindSettings(SearchSettings):
    prefixes: tuple[str, ...] = option(
        help="path of a corpus without .bin; documents of earlier corpora stay, duplicates in later ones are dropped",
        positional=True,
        metavar="PREFIX",
    )
    minhash: MinHashSettings = field(default_factory=MinHashSettings)
    add_attribute: str | None = option(
        None, "also add this attribute to the corpora: documents in the cluster of each document", metavar="NAME"
    )

    def origin(self, corpora: Sequence[Corpus]) -> str:
        """Return the description of the added attribute that the corpora's manifests record."""
        values = [f"{name}={value}" for name, value in asdict(self.minhash).items()]
        sha256 = [f"corpus={corpus.manifest.documents_sha256}" for corpus in corpora]
        return " ".join(["find-duplicates", f"add-attribute={self.add_attribute}", *values, *sha256])


def find_duplicates(options: FindSettings) -> None:
    """Find duplicates in finished corpora, and write a drop list of all but the first document of each cluster.

    Equal documents are always found, near-duplicates by MinHash. With --threshold 1, only equal documents are searched.

    Training skips the listed documents with --data-path PREFIX:drop=FILE; no corpus is copied. With --resume, nothing
    is done if the list is complete.
    """
    entries = list_duplicates(options)
    if entries is None:
        print(f"{options.output} is complete; nothing to do")
        return
    for entry in entries:
        print(
            f"{entry.prefix}: {entry.dropped_documents:,} of {entry.documents:,} documents dropped "
            f"({percent(entry.dropped_documents / entry.documents, digits=2)})"
        )
    added = f", added {options.add_attribute} to each corpus" if options.add_attribute is not None else ""
    print(f"wrote {options.output}{added}")


@dataclass(frozen=True)
class SignatureJob(Job[None]):
    """Write the keys of all documents of one range.

    For each band, and last for the whole-document hash, the file contains the sorted keys (uint64), then the document
    numbers in key order (uint32, counted from the first document of the range).
    """

    result_type = None
    sync = True
    kinds = ("keys",)

    documents: SearchedDocuments
    numbers: range
    minhash: MinHashSettings

    def work(self, files: Mapping[str, NewFile]) -> None:
        minhash = self.minhash
        ((_, corpus, in_corpus),) = self.documents.by_corpus(np.arange(self.numbers.start, self.numbers.stop))
        keys = np.empty((minhash.keys_per_document, len(in_corpus)), dtype=np.uint64)
        for step, ids, lengths in read_steps(corpus, in_corpus):
            if minhash.keys_per_document > 1:
                keys[:-1, step] = band_keys(minima(ids, lengths, minhash), minhash.rows)
            keys[-1, step] = hash_documents(ids, lengths)
        for key in keys:
            order = np.argsort(key, kind="stable")
            files["keys"].write(key[order].astype("<u8").data)
            files["keys"].write(order.astype("<u4").data)

    def read_keys(self, band: int, low: int, high: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return a band's keys in [low, high), sorted, and each key's document number. `high` may be 2^64."""
        count = len(self.numbers)
        at = band * count * 12
        keys: NDArray[np.uint64] = np.memmap(self.file("keys"), "<u8", "r", at, count)
        order: NDArray[np.uint32] = np.memmap(self.file("keys"), "<u4", "r", at + 8 * count, count)
        begin = int(np.searchsorted(keys, np.uint64(low)))
        end = count if high == 2**64 else int(np.searchsorted(keys, np.uint64(high)))
        return np.array(keys[begin:end]), self.numbers.start + order[begin:end].astype(np.int64)


@dataclass(frozen=True)
class PairJob(Job[None]):
    """Compare documents with equal keys of one band (or equal hashes) in one bucket, and write the similar pairs."""

    result_type = None
    sync = True
    kinds = ("pairs",)

    documents: SearchedDocuments
    minhash: MinHashSettings
    band: int
    bucket: int
    buckets: int

    def work(self, files: Mapping[str, NewFile]) -> None:
        low, high = (number * 2**64 // self.buckets for number in (self.bucket, self.bucket + 1))
        columns = [
            job.read_keys(self.band, low, high) for job in signature_jobs(self.folder, self.documents, self.minhash)
        ]
        keys, documents = (np.concatenate(column) for column in zip(*columns, strict=True))
        del columns
        # The sort is stable, so documents with equal keys are in ascending order.
        order = np.argsort(keys, kind="stable")
        keys, documents = keys[order], documents[order]
        del order
        # True for documents that are similar to an earlier document with their key.
        is_joined = np.zeros(len(keys), dtype=np.bool_)

        def compare(pairs: NDArray[np.int64]) -> None:
            for first in range(0, len(pairs), _STEP_PAIRS):
                step_pairs = pairs[first : first + _STEP_PAIRS]
                lengths = self._lengths_of(documents[step_pairs])
                for step in steps_of(lengths.sum(axis=1)):
                    similar = step_pairs[step][self._are_similar(documents[step_pairs[step]])]
                    is_joined[similar[:, 1]] = True
                    files["pairs"].write(documents[similar].astype(_PAIR_DTYPE).tobytes())

        compare(pair_neighbours(keys))
        in_families = find_families(keys, is_joined)
        lengths = self._lengths_of(documents[in_families])
        for block, families in divide_families(keys[in_families], lengths):
            positions = in_families[block]
            numbers, indices = np.unique(documents[positions], return_inverse=True)
            contents = self._read(numbers)
            ids = np.frombuffer(b"".join([contents[index] for index in indices.tolist()]), "<u4")
            pairs = pair_by_rare_ngrams(ids, lengths[block], families, is_joined[positions], self.minhash.ngram)
            compare(positions[pairs])

    def _lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = np.empty(documents.shape, dtype=np.int64)
        for mask, corpus, numbers in self.documents.by_corpus(documents):
            lengths[mask] = corpus.lengths_of(numbers)
        return lengths

    def _read(self, documents: NDArray[np.int64]) -> list[bytes]:
        """Return each document's token ids as bytes of 32-bit integers. `documents` must be sorted."""
        contents: list[bytes] = []
        # Sorted, so the documents of one corpus are consecutive.
        for _, corpus, numbers in self.documents.by_corpus(documents):
            lengths = corpus.lengths_of(numbers).astype(np.int64)
            ids = corpus.gather(numbers, np.zeros_like(numbers), lengths).astype("<u4").tobytes()
            contents += [ids[begin:end] for begin, end in pairwise([0, *(4 * np.cumsum(lengths)).tolist()])]
        return contents

    def _are_similar(self, pairs: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return True for each pair of document numbers in [pairs, 2] whose exact Jaccard index reaches the threshold.

        Cost on one core: 2 us for a pair of equal documents; 0.1 us per token of the two documents for other pairs.
        """
        documents, positions = np.unique(pairs.ravel(), return_inverse=True)
        contents, minhash = self._read(documents), self.minhash
        # Consecutive pairs often share a document.
        ngrams = lru_cache(maxsize=2)(lambda position: shingles(contents[position], minhash.ngram))

        is_similar = [
            contents[first] == contents[second] or jaccard(ngrams(first), ngrams(second)) >= minhash.threshold
            for first, second in positions.reshape(-1, 2).tolist()
        ]
        return np.array(is_similar, dtype=np.bool_)


def signature_jobs(folder: Path, documents: SearchedDocuments, minhash: MinHashSettings) -> list[SignatureJob]:
    """Return one job per range of documents."""
    return [
        SignatureJob(folder, f"signatures-{numbers.start}", documents, numbers, minhash) for numbers in documents.ranges
    ]


def list_duplicates(settings: FindSettings) -> list[DropListEntry] | None:
    """Find near-duplicates, write the drop list to `settings.output`, and remove OUTPUT.partial.

    Return the entries of the drop list, one per corpus, or None if a resumed search has nothing to do. Raise
    ConfigError if the threshold is out of range.
    """
    if not 0 < settings.minhash.threshold <= 1:
        raise ConfigError(
            f"--threshold {settings.minhash.threshold} is not above 0 and at most 1, as a Jaccard index is; change it."
        )
    corpora, recorded, added = open_corpora(settings.prefixes), asdict(settings.minhash), settings.add_attribute
    origin = settings.origin(corpora)
    missing = [corpus for corpus in corpora if added is not None and not is_added(corpus, origin, added)]
    if not missing and is_complete(settings, corpora, recorded):
        return None
    for corpus in missing:
        with attributes_folder(corpus):  # fails now, and not after the search, if it cannot be created
            pass
    with job_folder(settings) as folder, JobRunner(settings) as runner:
        documents = SearchedDocuments.of(corpora)
        begin(settings, folder, documents, recorded)
        buckets = -(-len(documents) // BUCKET_DOCUMENTS)
        pair_jobs = [
            PairJob(
                folder.path, f"pairs-{band}-{bucket}-of-{buckets}", documents, settings.minhash, band, bucket, buckets
            )
            for band in range(settings.minhash.keys_per_document)
            for bucket in range(buckets)
        ]
        for label, jobs in (
            ("signatures", signature_jobs(folder.path, documents, settings.minhash)),
            ("pairs", pair_jobs),
        ):
            for _ in finish_jobs(jobs, runner, label=label):
                pass
        firsts = find_clusters(len(documents), [job.file("pairs") for job in pair_jobs])
        if added is not None:
            sizes = np.split(count_cluster_sizes(firsts), np.cumsum([len(corpus) for corpus in corpora])[:-1])
            for corpus, sizes_in_corpus in zip(corpora, sizes, strict=True):
                add_attribute(corpus, origin, added, sizes_in_corpus)
        is_dropped = firsts != np.arange(len(documents), dtype=firsts.dtype)
        entries = write_drop_list(settings.output, corpora, is_dropped, recorded, folder=folder.path)
        folder.remove()
    return entries


def find_clusters(documents: int, pair_files: Sequence[Path]) -> NDArray[np.integer]:
    """Join all pairs to clusters by union-find. Return, for each document, the number of its cluster's first document.

    `pair_files` contain pairs of document numbers as int64.
    """
    parents: NDArray[np.integer] = np.arange(documents, dtype=np.uint32 if documents < 2**32 else np.int64)

    def find_roots(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        while True:
            # Path halving shortens the paths for later searches.
            parents[numbers] = parents[parents[numbers]]
            above = parents[numbers].astype(np.int64)
            if np.array_equal(above, numbers):
                return numbers
            numbers = above

    for path in pair_files:
        for step in read_items(path, _PAIR_DTYPE):
            first, second = step.reshape(-1, 2).T
            while len(first):
                first, second = find_roots(first), find_roots(second)
                is_apart = first != second
                first, second = first[is_apart], second[is_apart]
                # The root of a cluster is its first document. If a root gets several new parents in this step, it takes
                # the smallest; the other pairs are joined in the next iteration.
                np.minimum.at(parents, np.maximum(first, second), np.minimum(first, second).astype(parents.dtype))
    for start in range(0, documents, _STEP_DOCUMENTS):
        numbers = np.arange(start, min(start + _STEP_DOCUMENTS, documents))
        parents[numbers] = find_roots(numbers)
    return parents


def count_cluster_sizes(firsts: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the size of each document's cluster, in documents. `firsts` is the result of `find_clusters`."""
    sizes = np.zeros(len(firsts), dtype=np.int32)
    steps = [slice(start, start + _STEP_DOCUMENTS) for start in range(0, len(firsts), _STEP_DOCUMENTS)]
    for step in steps:
        numbers, counts = np.unique(firsts[step], return_counts=True)
        sizes[numbers] += counts.astype(np.int32)
    for step in steps:
        # A first document gets the value that it has.
        sizes[step] = sizes[firsts[step]]
    return sizes
