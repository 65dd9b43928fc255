"""The command `neobert find-overlaps`: list the documents of corpora that share an n-gram with evaluation texts.

Evaluation texts are a corpus, too: `neobert preprocess` reads their files, with the tokenizer of the searched corpora.
One job per range of documents looks for the 64-bit hashes of its n-grams among the hashes of the evaluation texts.
Texts of fewer than n tokens are not searched for. Memory per worker: up to 50 bytes per n-gram of the evaluation texts
(4.5 million n-grams: measured 44, and 46 without worker processes).

Source of the default length, 13: arXiv 2005.14165, appendix C, which counts words instead of tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.cli import option
from megatron_neobert.data.corpus.drop_list import DropListEntry, write_drop_list
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.deduplication.search import (
    SearchedDocuments,
    SearchSettings,
    begin,
    is_complete,
    job_folder,
    open_corpora,
    read_steps,
)
from megatron_neobert.runtime.jobs import Job, JobRunner, finish_jobs
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import percent

# Base of the polynomial hash of an n-gram, 2^64 / golden ratio, and a factor that mixes its bits.
_BASE, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_NGRAMS = "ngrams"  # file in the folder of the jobs: sorted hashes of the evaluation texts, as uint64


@dataclass(frozen=True, kw_only=True)
class OverlapSettings(SearchSettings):
    prefixes: tuple[str, ...] = option(
        help="path of a corpus without .bin that is searched", positional=True, metavar="PREFIX"
    )
    against: tuple[str, ...] = option(help="corpora of evaluation texts", metavar="PREFIX")
    ngram: int = option(13, "tokens per n-gram", minimum=1)


def find_overlaps(options: OverlapSettings) -> None:
    """List the documents that share an n-gram of tokens with evaluation texts, so that training can leave them out.

    Training skips the listed documents with --data-path PREFIX:drop=FILE. With --resume, nothing is done if the list is
    complete.
    """
    found = list_overlaps(options)
    if found is None:
        print(f"{options.output} is complete; nothing to do")
        return
    searched, evaluated = found
    for entry in searched:
        count, share = entry.dropped_documents, percent(entry.dropped_documents / entry.documents, digits=2)
        print(f"{entry.prefix}: {count:,} of {entry.documents:,} documents share {options.ngram} tokens ({share})")
    for each in evaluated:
        print(
            f"{each.prefix}: {each.shared:,} of {each.texts:,} texts share {options.ngram} tokens; "
            f"{each.short:,} are shorter and were not searched for"
        )
    print(f"wrote {options.output}")


@dataclass(frozen=True)
class Overlaps:
    """Counts of an evaluation corpus's texts: all, texts sharing an n-gram with a searched document, short texts."""

    prefix: str
    texts: int
    shared: int
    short: int  # texts of fewer tokens than an n-gram has


@dataclass(frozen=True)
class OverlapJob(Job[None]):
    """Find the documents of a range that share n-grams with evaluation texts; write their numbers and n-gram hashes."""

    result_type = None
    kinds = ("documents", "ngrams")

    documents: SearchedDocuments
    numbers: range
    ngram: int

    def work(self, files: Mapping[str, NewFile]) -> None:
        known = KnownHashes(np.fromfile(self.folder / _NGRAMS, "<u8"))
        ((_, corpus, in_corpus),) = self.documents.by_corpus(np.arange(self.numbers.start, self.numbers.stop))
        found = [np.empty(0, dtype=np.uint64)]
        for step, ids, lengths in read_steps(corpus, in_corpus):
            hashes, documents = hash_ngrams(ids, lengths, self.ngram)
            is_shared = known.contain(hashes)
            numbers = self.numbers.start + step.start + np.unique(documents[is_shared])
            files["documents"].write(numbers.astype("<i8").tobytes())
            found.append(hashes[is_shared])
        files["ngrams"].write(np.unique(np.concatenate(found)).astype("<u8").tobytes())


def list_overlaps(settings: OverlapSettings) -> tuple[list[DropListEntry], list[Overlaps]] | None:
    """Find documents that overlap evaluation texts, write the drop list `settings.output`, and remove OUTPUT.partial.

    Return one drop-list entry per searched corpus and one `Overlaps` per evaluation corpus, or None if the drop list of
    a resumed search is complete.
    """
    corpora = open_corpora((*settings.prefixes, *settings.against))
    searched, evaluated = corpora[: len(settings.prefixes)], corpora[len(settings.prefixes) :]
    against = [corpus.manifest.documents_sha256 for corpus in evaluated]
    recorded = {"ngram": settings.ngram, "against": against}
    if is_complete(settings, searched, recorded):
        return None
    with job_folder(settings) as folder, JobRunner(settings) as runner:
        documents = SearchedDocuments.of(searched)
        begin(settings, folder, documents, recorded)
        known = np.concatenate([hashes for corpus in evaluated for hashes, _ in hash_corpus(corpus, settings.ngram)])
        known.sort()
        known.astype("<u8", copy=False).tofile(folder.path / _NGRAMS)
        del known
        jobs = [
            OverlapJob(folder.path, f"overlaps-{numbers.start}", documents, numbers, settings.ngram)
            for numbers in documents.ranges
        ]
        for _ in finish_jobs(jobs, runner, label="n-grams"):
            pass
        is_shared = np.zeros(len(documents), dtype=np.bool_)
        is_shared[np.concatenate([np.fromfile(job.file("documents"), "<i8") for job in jobs])] = True
        found = KnownHashes(np.unique(np.concatenate([np.fromfile(job.file("ngrams"), "<u8") for job in jobs])))
        entries = write_drop_list(settings.output, searched, is_shared, recorded, folder=folder.path)
        overlaps = []
        for corpus in evaluated:
            steps = hash_corpus(corpus, settings.ngram)
            shared = sum(len(np.unique(texts[found.contain(hashes)])) for hashes, texts in steps)
            short = int((corpus.lengths_between(0, len(corpus)) < settings.ngram).sum())
            overlaps.append(Overlaps(str(corpus.prefix), len(corpus), shared, short))
        folder.remove()
    return entries, overlaps


def hash_corpus(corpus: Corpus, ngram: int) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
    """Yield the result of `hash_ngrams` for each group of consecutive documents, until the end of the corpus."""
    for _, ids, lengths in read_steps(corpus, np.arange(len(corpus))):
        yield hash_ngrams(ids, lengths, ngram)


def hash_ngrams(
    ids: NDArray[np.integer], lengths: NDArray[np.int32], ngram: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return a 64-bit hash of each n-gram, and the index of the n-gram's document. No n-gram spans two documents.

    `ids` are the concatenated token ids of the documents, and `lengths` the documents' token counts.
    """
    tokens = ids.astype(np.uint64) + np.uint64(1)
    count = max(0, len(tokens) - ngram + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(ngram):
        hashes *= _BASE
        hashes += tokens[offset : offset + count]
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(32)
    documents = np.repeat(np.arange(len(lengths)), lengths)[:count]
    is_inside = np.arange(count) + ngram <= np.cumsum(lengths)[documents]
    return hashes[is_inside], documents[is_inside]


class KnownHashes:
    """Set of hashes. A table of 16 to 32 entries per hash rules out most unknown hashes without a search.

    `sorted_hashes` are in ascending order.
    """

    def __init__(self, sorted_hashes: NDArray[np.uint64]) -> None:
        self._sorted = sorted_hashes
        size = 1 << (16 * len(self._sorted) + 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._table = np.zeros(size, dtype=np.bool_)
        self._table[self._entries(self._sorted)] = True

    def contain(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return True for each hash in `hashes` that is in the set."""
        is_known = self._table[self._entries(hashes)]
        at = np.searchsorted(self._sorted, hashes[is_known])
        is_known[is_known] = self._sorted[np.minimum(at, len(self._sorted) - 1)] == hashes[is_known]
        return is_known

    def _entries(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        # A view, because indexing with unsigned integers would copy them.
        return (hashes & self._mask).view(np.int64)
