"""Corpora of the .bin and .idx that Megatron-LM has written; the .bin is read once.

Megatron's tools/preprocess_data.py differs in three ways: with --split-sentences a document is several sequences, with
--append-eod its last token is an end-of-document token, and a document without tokens is a boundary that occurs twice.
The documents become one chunk, of which `write_corpus` makes PREFIX_documents. Its .bin is a hard link to Megatron's,
or a copy without the end-of-document tokens.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from megatron_neobert.cli import option
from megatron_neobert.data.corpus.format import NO_TOKENS, CorpusFiles, InputRecord, corpus_files, draft_manifest
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.shard_job import ChunkFiles
from megatron_neobert.data.corpus.volumes import HEADER, AllowedIds, check_index, damage, read_header
from megatron_neobert.data.corpus.writer import OutputSettings, write_corpus
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError, MissingInputError, OutputError
from megatron_neobert.runtime.jobs import JobFolder
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import visible

_CHUNK = 1 << 14  # documents handled at a time, ids included


@dataclass(frozen=True, kw_only=True)
class AdoptOptions:
    """The command line of `neobert adopt`."""

    prefixes: tuple[str, ...] = option(
        help="path without .bin; finished corpora are passed over", positional=True, metavar="PREFIX"
    )
    tokenizer_model: str = option(help="tokenizer that they were written with", metavar="PATH")
    tokenizer_type: str = option("auto", "type of the tokenizer, as in preprocessing")


def adopt_corpora(options: AdoptOptions) -> None:
    """Make corpora of .bin and .idx files that Megatron-LM has written.

    Reads all of both files, the .bin once: sizes, index, every id against the vocabulary. Megatron's files stay as they
    are.
    """
    tokenizer = load_tokenizer(options.tokenizer_model, options.tokenizer_type)
    for prefix in options.prefixes:
        corpus, eod_id = adopt(prefix, tokenizer)
        text = tokenizer.backend.decode(corpus.document(0)[:32].tolist(), skip_special_tokens=False)
        ends = "" if eod_id is None else f", without the id {eod_id} at the end of each (--append-eod)"
        print(f"{corpus.prefix} is a corpus: {len(corpus):,} documents{ends}")
        for name, value in corpus.manifest.describe().items():
            print(f"  {name:<18} {value}")
        print(f"  {'begins':<18} {visible(text)}")


def adopt(prefix: str, tokenizer: Tokenizer) -> tuple[Corpus, int | None]:
    """Make the corpus PREFIX_documents of PREFIX.bin and PREFIX.idx; return it, and the token that ended documents.

    Raises:
        MissingInputError: One of the two does not exist.
        DataError: They are damaged, were written with another tokenizer, or end only some documents by a token.
        OutputError: Other files have the name that the corpus would have.
    """
    source, files = corpus_files(prefix), corpus_files(f"{prefix}_documents")
    for known in (source, files):
        if known.manifest.exists():
            corpus = Corpus(known.manifest.with_suffix(""))
            corpus.check_tokenizer(tokenizer)
            return corpus, None
    for file in (source.bin, source.idx):
        if not file.is_file():
            raise MissingInputError(f"no {file}; give the prefix of Megatron-LM's files without .bin")
    # With a partial folder, an earlier call was killed while it moved its own files.
    if (existing := files.existing()) and not files.partial.exists():
        raise OutputError(f"{existing[0]} has no manifest beside it; move it away, for the corpus takes its name")
    megatron = _MegatronIndex(source)
    with JobFolder(files.partial) as folder:
        chunk, source_sha256, eod_id = _write_chunk(folder.path, source, megatron, tokenizer)
        draft = draft_manifest(
            tokenizer,
            inputs={source.bin.name: InputRecord(source.bin.stat().st_size, source_sha256)},
            text_key="",
            filters={},
            records=megatron.documents + megatron.empty,
            repaired_documents=0,
            rejected={},
            dropped={NO_TOKENS: megatron.empty} if megatron.empty else {},
        )
        output = OutputSettings(files, None, validation_fraction=0.0, deduplicate=False)
        write_corpus([chunk], output, replace(draft, dtype=megatron.dtype.name), folder=folder.path)
    return Corpus(f"{prefix}_documents"), eod_id


class _MegatronIndex:
    """Documents of PREFIX.idx, each of which is a run of sequences. DataError if it contradicts itself or the .bin."""

    def __init__(self, files: CorpusFiles) -> None:
        self.dtype, sequences, _ = read_header(files.idx)
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

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """Yield the tokens of each document, 0 for those that are empty."""
        for first in range(0, len(self._boundaries) - 1, _CHUNK):
            at = self._boundaries[first : first + _CHUNK + 1]
            inside = at < len(self._pointers)
            begins = np.full(len(at), self._end)
            begins[inside] = self._pointers[at[inside]]
            yield np.diff(begins) // self.dtype.itemsize


def _write_chunk(
    folder: Path, source: CorpusFiles, megatron: _MegatronIndex, tokenizer: Tokenizer
) -> tuple[ChunkFiles, str, int | None]:
    """Write all documents as one chunk; return it, the sha256 of Megatron's .bin, and the token that ends documents."""
    allowed = AllowedIds(tokenizer.special_ids, unknown=tokenizer.unk_id, vocab_size=tokenizer.vocab_size)
    digest, documents, tokens, unknown_tokens, eod_id = hashlib.sha256(), 0, 0, 0, None
    with (
        NewFile(folder / "0.ids") as ids_file,
        NewFile(folder / "0.lengths") as lengths_file,
        source.bin.open("rb") as stream,
    ):
        for some in megatron.chunks():
            lengths = some[some > 0]
            ids = np.fromfile(stream, megatron.dtype, int(lengths.sum()))
            digest.update(ids.data)
            ends = np.cumsum(lengths) - 1
            if not documents and lengths.size and allowed.first_wrong(ids[ends[:1]]) is not None:
                eod_id = int(ids[ends[0]])  # as no text has it
            if eod_id is not None:
                wrong = np.flatnonzero((ids[ends] != eod_id) | (lengths == 1))
                if wrong.size:
                    raise DataError(
                        f"{source.bin}: the first document ends with the special token {eod_id}, but document "
                        f"{documents + wrong[0]} does not, or has no other token. Megatron-LM ends all documents by "
                        "one, or none: preprocess again, or --tokenizer-model is not the one that it was written with"
                    )
                ids, lengths = np.delete(ids, ends), lengths - 1
                ids_file.write(ids.data)
            if (at := allowed.first_wrong(ids)) is not None:
                document = documents + int(np.searchsorted(np.cumsum(lengths), at, side="right"))
                raise DataError(
                    f"{source.bin}: document {document}: expected {allowed.describe(ids[at])}, found {ids[at]}; the "
                    "file is damaged, or --tokenizer-model is not the one that it was written with"
                )
            lengths_file.write(lengths.astype("<i4").data)
            unknown_tokens += int(np.count_nonzero(ids == allowed.unknown))
            documents, tokens = documents + lengths.size, tokens + ids.size
        if eod_id is None:
            ids_file.link(source.bin.resolve(), sha256=digest.hexdigest())
        sha256 = {"ids": ids_file.commit().sha256, "lengths": lengths_file.commit().sha256}
    (folder / "0.rejects").touch()
    return ChunkFiles(source.bin.name, "0", documents, tokens, unknown_tokens, sha256), digest.hexdigest(), eod_id
