"""The command `neobert adopt`: make corpora from the .bin and .idx that Megatron-LM wrote.

Files of Megatron's tools/preprocess_data.py differ from a corpus in three ways. With --split-sentences, a document is
several sequences. With --append-eod, its last token is an end-of-document token. An empty document is a boundary that
occurs twice. All documents become one chunk, from which `write_corpus` makes PREFIX_documents. Its .bin is a hard link
to Megatron's, or a copy without the end-of-document tokens. The .bin is read once.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.cli import option
from megatron_neobert.data.corpus.format import NO_TOKENS, CorpusFiles, Counts, corpus_files
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.shard_files import HEADER, AllowedIds, MappedShard, damage_error
from megatron_neobert.data.corpus.writer import TokenizedChunk, write_corpus
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError, MissingInputError, OutputError
from megatron_neobert.runtime.jobs import Finished, JobFolder
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import visible

# Documents whose ids are in memory at a time.
_STEP = 1 << 14


@dataclass(frozen=True, kw_only=True)
class AdoptOptions:
    prefixes: tuple[str, ...] = option(
        help="path of Megatron-LM's files without .bin; finished corpora are skipped", positional=True, metavar="PREFIX"
    )
    tokenizer_model: str = option(help="tokenizer with which the files were written", metavar="PATH")


def adopt(options: AdoptOptions) -> None:
    """Make a corpus from .bin and .idx files that Megatron-LM wrote.

    The command checks sizes, the index, and every id against the vocabulary, and prints a summary of each corpus.
    Megatron's files do not change.
    """
    tokenizer = load_tokenizer(options.tokenizer_model)
    for prefix in options.prefixes:
        corpus, eod_id = adopt_corpus(prefix, tokenizer)
        eod = "" if eod_id is None else f", without the id {eod_id} at the end of each (--append-eod)"
        print(f"{corpus.prefix} is a corpus: {len(corpus):,} documents{eod}")
        for name, value in corpus.describe().items():
            print(f"  {name:<18} {value}")
        print(f"  {'begins':<18} {visible(tokenizer.decode(corpus.document(0)[:32]))}")


def adopt_corpus(prefix: str, tokenizer: Tokenizer) -> tuple[Corpus, int | None]:
    """Write the corpus PREFIX_documents from Megatron's PREFIX.bin and PREFIX.idx, and open it.

    If PREFIX or PREFIX_documents is a corpus already, open that corpus and write nothing.

    Returns:
        The corpus, and the end-of-document id that this call removed from each document, or None.

    Raises:
        MissingInputError: The .bin or the .idx does not exist.
        DataError: The index or an id is damaged, or the tokenizer does not fit the files.
        OutputError: A file of the new corpus exists without a manifest, or another process writes the corpus.
    """
    source, files = corpus_files(prefix), corpus_files(f"{prefix}_documents")
    for candidate in (source, files):
        if candidate.manifest.exists():
            corpus = Corpus(candidate.manifest.with_suffix(""))
            corpus.check_tokenizer(tokenizer)
            return corpus, None
    for file in (source.bin, source.idx):
        if not file.is_file():
            raise MissingInputError(f"no {file}; give the prefix of Megatron-LM's files without .bin")
    # If the partial folder exists, an earlier call was killed while it moved these files to their final names.
    if (existing := files.existing_files()) and not files.partial.exists():
        raise OutputError(f"{existing[0]} has no manifest, but the new corpus needs this name; move the file away")
    shard = MappedShard(source.bin, source.idx)
    shard.check_index(shard.pointers)
    with JobFolder(files.partial) as folder:
        chunk, eod_id = _write_chunk(folder.path, source, shard, tokenizer)
        write_corpus([chunk], files, tokenizer, dtype=shard.dtype, text_key="", filters={})
    return Corpus(f"{prefix}_documents"), eod_id


def _write_chunk(
    folder: Path, source: CorpusFiles, shard: MappedShard, tokenizer: Tokenizer
) -> tuple[Finished[TokenizedChunk], int | None]:
    """Write all documents that are not empty as one chunk: 0.ids, 0.lengths and an empty 0.rejects in `folder`.

    Return the chunk, and the end-of-document id that was removed, or None. Raise DataError if the document boundaries
    are wrong, an id may not occur in a document, or some documents, but not all, end with a special token.
    """
    allowed = AllowedIds(tokenizer.special_ids, unknown=tokenizer.unk_id, vocab_size=tokenizer.vocab_size)
    digest, counts, empty, eod_id = hashlib.sha256(), Counts(), 0, None
    with (
        NewFile(folder / "0.ids") as ids_file,
        NewFile(folder / "0.lengths") as lengths_file,
        source.bin.open("rb") as stream,
    ):
        for lengths in _document_lengths(shard):
            empty += int(np.count_nonzero(lengths == 0))
            lengths = lengths[lengths > 0]
            ids = np.fromfile(stream, shard.dtype, int(lengths.sum()))
            digest.update(ids.data)
            ends = np.cumsum(lengths) - 1
            # No text contains a special token, so one at the end of the first document is an end-of-document token.
            if not counts.documents and lengths.size and allowed.first_forbidden(ids[ends[:1]]) is not None:
                eod_id = int(ids[ends[0]])
            if eod_id is not None:
                wrong = np.flatnonzero((ids[ends] != eod_id) | (lengths == 1))
                if wrong.size:
                    raise DataError(
                        f"{source.bin}: the first document ends with the special token {eod_id}, but document "
                        f"{counts.documents + wrong[0]} does not, or has no other token. Preprocess again, or give the "
                        "--tokenizer-model with which the files were written"
                    )
                ids, lengths = np.delete(ids, ends), lengths - 1
                ids_file.write(ids.data)
            if (at := allowed.first_forbidden(ids)) is not None:
                document = counts.documents + int(np.searchsorted(np.cumsum(lengths), at, side="right"))
                raise DataError(
                    f"{source.bin}: document {document}: expected {allowed.rule_for(ids[at])}, found {ids[at]}. Copy "
                    "the file again, or give the --tokenizer-model with which it was written"
                )
            lengths_file.write(lengths.astype("<i4").data)
            counts.unknown_tokens += int(np.count_nonzero(ids == allowed.unknown))
            counts.documents, counts.tokens = counts.documents + lengths.size, counts.tokens + ids.size
        if not counts.documents:
            raise DataError(f"{shard.idx}: {empty:,} documents, all empty; a corpus needs one document or more")
        if empty:
            counts.dropped[NO_TOKENS] = empty
        if eod_id is None:
            ids_file.link(source.bin.resolve(), sha256=digest.hexdigest())
        files = {"ids": ids_file.commit(), "lengths": lengths_file.commit()}
    (folder / "0.rejects").touch()
    chunk = TokenizedChunk("0", source.bin.name, source.bin.stat().st_size, digest.hexdigest(), counts)
    return Finished("", files, chunk), eod_id


def _document_lengths(shard: MappedShard) -> Iterator[NDArray[np.int64]]:
    """Yield arrays with the token count of each document in Megatron's .idx. A document can be several sequences.

    An empty document has length 0. Raise DataError if the document boundaries contradict the index.
    """
    boundaries, sequences = shard.boundaries, shard.lengths.size
    at_boundaries = HEADER.size + 12 * sequences
    if boundaries[0] != 0 or boundaries[-1] != sequences:
        found = f"{boundaries[0]} to {boundaries[-1]}"
        raise damage_error(shard.idx, at_boundaries, f"document boundaries from 0 to {sequences}", found)
    for first in range(0, len(boundaries) - 1, _STEP):
        step = boundaries[first : first + _STEP + 1]
        has_pointer = step < sequences
        begins = np.full(len(step), shard.end)
        begins[has_pointer] = shard.pointers[step[has_pointer]]
        lengths = np.diff(begins) // shard.dtype.itemsize
        if (lengths < 0).any():
            raise damage_error(shard.idx, at_boundaries, "ascending document boundaries", "descending ones")
        yield lengths
