"""Corpora that Megatron-LM has written become ours where they lie; their .bin is read once and never copied.

Megatron's tools/preprocess_data.py differs in three ways: with --split-sentences a document is several sequences, with
--append-eod its last token is an end-of-document token, and a document without tokens is a boundary that occurs twice.
Where none of that is so, the manifest alone is missing. Else a corpus PREFIX_documents is made of a link to the .bin,
an index of whole documents and a manifest; end-of-document tokens stay in the .bin, between the documents.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from megatron_neobert.cli import option
from megatron_neobert.data.corpus.format import (
    NO_TOKENS,
    CorpusFiles,
    InputRecord,
    LengthCounts,
    Manifest,
    Volume,
    corpus_files,
    draft_manifest,
    write_manifest,
)
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.volumes import (
    HEADER,
    AllowedIds,
    MappedVolume,
    check_index,
    damage,
    read_header,
    write_index,
)
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError, MissingInputError, OutputError
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.runtime.new_file import FileRecord, NewFile
from megatron_neobert.text import visible

_CHUNK = 1 << 20  # documents handled at a time


@dataclass(frozen=True, kw_only=True)
class AdoptOptions:
    """The command line of `neobert adopt`."""

    prefixes: tuple[str, ...] = option(
        help="path without .bin; finished corpora are passed over", positional=True, metavar="PREFIX"
    )
    tokenizer_model: str = option(help="tokenizer that they were written with", metavar="PATH")
    tokenizer_type: str = option("auto", "type of the tokenizer, as in preprocessing")


def adopt_corpora(options: AdoptOptions) -> None:
    """Make corpora of .bin and .idx files that Megatron-LM has written, in place and without a copy.

    Reads all of both files, the .bin once: sizes, index, every id against the vocabulary. Megatron's files stay as they
    are.

    Raises:
        DataError, MissingInputError, OutputError: As `adopt` does.
    """
    tokenizer = load_tokenizer(options.tokenizer_model, options.tokenizer_type)
    for prefix in options.prefixes:
        adopted = adopt(prefix, tokenizer)
        text = tokenizer.backend.decode(Corpus(adopted.prefix).document(0)[:32].tolist(), skip_special_tokens=False)
        print(f"{adopted.prefix} {'was a corpus already' if adopted.already else 'is a corpus'}: {adopted.found}")
        for name, value in adopted.manifest.describe().items():
            print(f"  {name:<18} {value}")
        print(f"  {'begins':<18} {visible(text)}")


class Adopted(NamedTuple):
    """A corpus that can be trained on."""

    prefix: str
    manifest: Manifest
    found: str  # what Megatron's files hold
    already: bool  # it was there before


def adopt(prefix: str, tokenizer: Tokenizer) -> Adopted:
    """Reads all of PREFIX.bin and PREFIX.idx, and writes what a corpus has besides; after a kill, the same call again.

    Raises:
        MissingInputError: One of the two is not there.
        DataError: They are damaged, were written with another tokenizer, or end only some documents by a token.
        OutputError: Other files have the name that the corpus would have.
    """
    source = corpus_files(prefix)
    for file in (source.bin, source.idx):
        if not file.is_file():
            raise MissingInputError(f"no {file}; give the prefix of Megatron-LM's files without .bin")
    megatron = _MegatronIndex(source)
    last_id = megatron.last_id_of_first(source.bin)
    never = {*tokenizer.special_ids} - {tokenizer.unk_id}
    eod_id = last_id if last_id in never or last_id >= tokenizer.vocab_size else None
    in_place = eod_id is None and megatron.are_sequences
    files = source if in_place else corpus_files(f"{prefix}_documents")
    adopted_prefix = str(files.manifest.with_name(files.name))
    if already := files.manifest.exists():
        corpus = Corpus(adopted_prefix)
        corpus.check_tokenizer(tokenizer)
        return Adopted(adopted_prefix, corpus.manifest, megatron.describe(eod_id), already)
    of_killed_call = files.bin.exists() and files.bin.samefile(source.bin)
    for file in () if in_place or of_killed_call else (files.bin, files.idx):
        if file.exists():
            raise OutputError(f"{file} is not of {source.bin.name}; move it away, for the corpus takes its name")
    try:
        if in_place:
            index = FileRecord(source.idx.stat().st_size, sha256_of(source.idx))
        else:
            _link(source.bin, files.bin)
            gap = 0 if eod_id is None else 1
            with NewFile(files.idx) as new:
                write_index(new, lambda: megatron.lengths(gap), megatron.documents, megatron.dtype, gap=gap)
                index = new.commit()
        manifest = _describe(files, source, megatron, index, eod_id, tokenizer)
    except DataError as error:
        for file in () if in_place else (files.bin, files.idx):
            file.unlink(missing_ok=True)
        raise DataError(f"{error}; or --tokenizer-model is not the one that it was written with") from error
    write_manifest(files.manifest, manifest)
    return Adopted(adopted_prefix, manifest, megatron.describe(eod_id), already)


class _MegatronIndex:
    """What PREFIX.idx says about documents, each of which is a run of sequences.

    Raises:
        DataError: It contradicts itself or the size of the .bin.
    """

    def __init__(self, files: CorpusFiles) -> None:
        self._path = files.idx
        self.dtype, sequences, boundaries = read_header(files.idx)
        index = np.memmap(files.idx, np.uint8, mode="r")
        at_pointers, at_boundaries = HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
        lengths = index[HEADER.size : at_pointers].view("<i4")
        self._pointers = index[at_pointers:at_boundaries].view("<i8")  # bytes
        self._boundaries = index[at_boundaries:].view("<i8")
        check_index(files.idx, lengths, self._pointers, self.dtype)
        self._end = int(self._pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize
        if files.bin.stat().st_size != self._end:
            raise damage(files.bin, 0, f"{self._end} bytes, as in {files.idx.name}", f"{files.bin.stat().st_size}")
        if self._boundaries[0] != 0 or self._boundaries[-1] != sequences:
            found = f"{self._boundaries[0]} to {self._boundaries[-1]}"
            raise damage(files.idx, at_boundaries, f"document boundaries from 0 to {sequences}", found)
        self.documents = self.empty = 0
        for some in self.chunks():
            if (some < 0).any():
                raise damage(files.idx, at_boundaries, "document boundaries that never fall", "some that do")
            self.documents += int(np.count_nonzero(some))
            self.empty += int(np.count_nonzero(some == 0))
        self.are_sequences = boundaries == sequences + 1 and not self.empty

    def describe(self, eod_id: int | None) -> str:
        """What was found, in words."""
        sequences = len(self._pointers)
        form = "one sequence each" if sequences == self.documents else f"{sequences:,} sequences (--split-sentences)"
        end = "nothing at their end" if eod_id is None else f"id {eod_id} at their end (--append-eod)"
        return f"{self.documents:,} documents, {form}, {end}, {self.empty:,} empty ones besides"

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """Tokens of each document, also of those without any."""
        for first in range(0, len(self._boundaries) - 1, _CHUNK):
            at = self._boundaries[first : first + _CHUNK + 1]
            inside = at < len(self._pointers)
            begins = np.full(len(at), self._end)
            begins[inside] = self._pointers[at[inside]]
            yield np.diff(begins) // self.dtype.itemsize

    def lengths(self, gap: int) -> Iterator[NDArray[np.int32]]:
        """Tokens of each document that has some, without the `gap` tokens at its end."""
        for some in self.chunks():
            lengths = some[some > 0] - gap
            if (lengths == 0).any():
                raise DataError(
                    f"{self._path}: the first document ends with a special token, but another has one token alone; "
                    "Megatron-LM ends all documents by one, or none: preprocess again"
                )
            yield lengths.astype(np.int32)

    def last_id_of_first(self, bin_path: Path) -> int:
        """Of the first document's tokens the last."""
        length = next(int(some[some > 0][0]) for some in self.chunks() if (some > 0).any())
        return int(np.fromfile(bin_path, self.dtype, length)[-1])


def _describe(
    files: CorpusFiles,
    source: CorpusFiles,
    sequences: _MegatronIndex,
    index: FileRecord,
    eod_id: int | None,
    tokenizer: Tokenizer,
) -> Manifest:
    """Reads the .bin for its checksum, for ids that cannot be the tokenizer's, and for those that are unknown."""
    gap, counts = 0 if eod_id is None else 1, LengthCounts()
    for some in sequences.lengths(gap):
        counts.add(some)
    volume = MappedVolume(
        files.bin,
        files.idx,
        expected=Volume(sequences.documents, counts.tokens, FileRecord(0, ""), index),
        dtype=sequences.dtype.name,
        gap=gap,
        manifest=files.manifest,
    )
    allowed = AllowedIds(tokenizer.special_ids, unknown=tokenizer.unk_id, vocab_size=tokenizer.vocab_size)
    sha256, unknown_tokens = allowed.scan(volume, eod_id=eod_id)
    content = FileRecord(files.bin.stat().st_size, sha256)
    draft = draft_manifest(
        tokenizer,
        inputs={source.bin.name: InputRecord(content.bytes, content.sha256, counts.documents, counts.tokens)},
        text_key="",
        filters={},
        records=sequences.documents + sequences.empty,
        repaired_documents=0,
        rejected={},
        dropped={NO_TOKENS: sequences.empty} if sequences.empty else {},
    )
    return replace(
        draft,
        dtype=sequences.dtype.name,
        documents=counts.documents,
        tokens=counts.tokens,
        unknown_tokens=unknown_tokens,
        statistics=counts.statistics(),
        volumes=[Volume(counts.documents, counts.tokens, content, index, files.name)],
        eod_id=eod_id,
    )


def _link(source: Path, target: Path) -> None:
    """A second name for a file, on its file system a hard link."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        target.symlink_to(source.resolve())
