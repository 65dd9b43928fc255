"""Common parts of the searches through finished corpora: ranges of documents, jobs, and the drop list as the result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert import __version__
from megatron_neobert.cli import option
from megatron_neobert.data.corpus.drop_list import read_drop_list, refuse_other_file
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import ConfigError, DataError, MissingInputError, OutputError
from megatron_neobert.runtime.jobs import JobFolder, JobOptions
from megatron_neobert.text import parse_json

RANGE_DOCUMENTS = 1 << 18  # after a kill, a worker repeats at most one range of this size
# Tokens per step, see `steps_of`. This size fits the second-level cache and was measured the fastest.
_STEP_TOKENS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SearchSettings(JobOptions):
    """Settings of a search through corpora that writes a drop list."""

    output: Path = option(help="drop list to write, one for all corpora", metavar="FILE")
    overwrite: bool = option(False, "replace an existing list, and the unfinished work of another run")


@dataclass(frozen=True)
class SearchedDocuments:
    """All documents of the compared corpora, numbered across corpora and divided into ranges."""

    # Of each corpus.
    prefixes: tuple[str, ...]
    sha256: tuple[str, ...]
    sizes: tuple[int, ...]
    range_documents: int

    @classmethod
    def of(cls, corpora: Sequence[Corpus]) -> "SearchedDocuments":
        return cls(
            prefixes=tuple(str(Path(corpus.prefix).absolute()) for corpus in corpora),
            sha256=tuple(corpus.manifest.documents_sha256 for corpus in corpora),
            sizes=tuple(map(len, corpora)),
            range_documents=RANGE_DOCUMENTS,
        )

    def __len__(self) -> int:
        return sum(self.sizes)

    @cached_property
    def ranges(self) -> list[range]:
        """Document numbers that one job searches. All documents of a range are in the same corpus."""
        bounds = [0, *accumulate(self.sizes)]
        step = self.range_documents
        return [range(at, min(at + step, end)) for start, end in pairwise(bounds) for at in range(start, end, step)]

    def by_corpus(self, numbers: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.bool_], Corpus, NDArray[np.int64]]]:
        """Yield (mask, corpus, document numbers in the corpus) for each corpus with documents in `numbers`.

        The mask has the shape of `numbers` and marks the corpus's documents. Raise DataError if a corpus has changed
        since the run began.
        """
        bounds = np.append(0, np.cumsum(self.sizes))
        corpus_of = np.searchsorted(bounds, numbers, side="right") - 1
        for index in np.unique(corpus_of).tolist():
            mask = corpus_of == index
            yield mask, open_corpus(self.prefixes[index], self.sha256[index]), numbers[mask] - bounds[index]


def begin(
    settings: SearchSettings, folder: JobFolder, documents: SearchedDocuments, recorded: Mapping[str, Any]
) -> None:
    """Start or resume a search. `recorded` are the settings that a resumed search must repeat.

    Raise OutputError if `output` exists but is not a drop list, or if `output` exists and the run neither overwrites
    nor resumes an unfinished run.
    """
    may_replace = settings.overwrite or (settings.resume and folder.has_begun)
    if settings.output.exists() and not may_replace:
        raise OutputError(f"--output {settings.output} exists already; choose another, or replace with --overwrite")
    refuse_other_file(settings.output)
    size = {"documents of a range": documents.range_documents, "version": __version__}
    decisive = {"corpora": documents.sha256, **recorded, **size}
    folder.begin(decisive, resume=settings.resume, overwrite=settings.overwrite)


def is_complete(settings: SearchSettings, corpora: Sequence[Corpus], recorded: Mapping[str, Any]) -> bool:
    """Return True if a resumed search has nothing to do: an undamaged drop list of these corpora, in order, exists.

    `recorded` are the settings that the list's header must contain. If an earlier deletion of OUTPUT.partial was
    interrupted, the rest is deleted.
    """
    if not settings.resume or job_folder(settings).has_begun:
        return False
    try:
        for corpus in corpora:
            read_drop_list(settings.output, corpus)
    except (MissingInputError, DataError):
        return False
    with settings.output.open("rb") as stream:
        header = parse_json(stream.readline())
    in_order = [entry["documents_sha256"] for entry in header["corpora"]]
    is_same = in_order == [corpus.manifest.documents_sha256 for corpus in corpora]
    is_same &= all(header.get(name) == value for name, value in recorded.items())
    if is_same:
        job_folder(settings).sweep()
    return is_same


def job_folder(settings: SearchSettings) -> JobFolder:
    """Return a context manager for OUTPUT.partial. The path is absolute: workers may have another current folder."""
    return JobFolder(settings.output.absolute().with_name(f"{settings.output.name}.partial"))


def read_steps(corpus: Corpus, documents: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[Any], NDArray[np.int32]]]:
    """Yield (slice, concatenated token ids, lengths in tokens) for consecutive slices of `documents`."""
    lengths = corpus.lengths_of(documents)
    for step in steps_of(lengths):
        numbers = documents[step]
        yield step, corpus.gather(numbers, np.zeros_like(numbers), lengths[step].astype(np.int64)), lengths[step]


def steps_of(lengths: NDArray[np.integer]) -> list[slice]:
    """Divide `lengths` into consecutive slices of about _STEP_TOKENS tokens, at most one element above this limit."""
    step_of = np.cumsum(lengths, dtype=np.int64) // _STEP_TOKENS
    bounds = [0, *(np.flatnonzero(np.diff(step_of)) + 1).tolist(), len(lengths)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


# A worker has many ranges of one corpus.
@cache
def open_corpus(prefix: str, documents_sha256: str) -> Corpus:
    """Open a corpus; raise DataError if it has changed since the run began."""
    corpus = Corpus(prefix)
    if corpus.manifest.documents_sha256 != documents_sha256:
        raise DataError(f"{prefix} has been written again since this run began; start again with --overwrite")
    return corpus


def open_corpora(prefixes: Sequence[str]) -> list[Corpus]:
    """Open the corpora. Raise DataError if their tokenizers differ, and ConfigError if two corpora are equal."""
    corpora = [Corpus(prefix) for prefix in prefixes]
    for first, second in combinations(corpora, 2):
        expected, found = first.manifest.tokenizer_fingerprint, second.manifest.tokenizer_fingerprint
        if found != expected:
            raise DataError(
                f"{second.prefix} was written with tokenizer {found[:12]}, but {first.prefix} with "
                f"{expected[:12]}: the same ids mean other words. Preprocess both with one tokenizer"
            )
        if first.manifest.documents_sha256 == second.manifest.documents_sha256:
            raise ConfigError(f"{second.prefix} and {first.prefix} are the same corpus; name it once")
    return corpora
