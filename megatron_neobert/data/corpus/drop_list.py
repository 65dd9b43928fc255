"""Drop lists: files with one bit per document of one or more corpora, set if the document is dropped.

The first line is a JSON header (`head -n 1`). The bits of each corpus follow, document 0 first; each corpus begins at a
new byte. Corpora are identified by checksum, so a drop list applies to every copy of a corpus, under any path.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import DataError, MissingInputError, OutputError
from megatron_neobert.runtime.atomic_files import replacing
from megatron_neobert.text import parse_json

_FORMAT = "megatron_neobert drop list 1"
_COMMANDS = "neobert find-duplicates or neobert find-overlaps"
_DAMAGED = f"it is damaged; copy it again, or run {_COMMANDS} again"
_LONGEST_HEADER_BYTES = 1 << 24  # a corpus takes about 300 bytes


@dataclass(frozen=True)
class DropListEntry:
    """One corpus of a drop list."""

    prefix: str  # as on the command line; the corpus may have moved since
    documents_sha256: str
    documents: Annotated[int, msgspec.Meta(ge=1)]
    dropped_documents: int
    mask_sha256: str  # of the bits of this corpus, in whole bytes


class _Header(msgspec.Struct):
    format: Literal["megatron_neobert drop list 1"]
    corpora: list[DropListEntry]


def read_drop_list(path: Path, corpus: Corpus) -> tuple[DropListEntry, NDArray[np.uint8]]:
    """Read a corpus's part of a drop list. The checksum identifies the corpus.

    Returns:
        The entry of the corpus, and its mask: one bit per document, 1 if the document is dropped. Each byte holds eight
        documents, the first in the lowest bit. The mask is read-only and mapped into memory.

    Raises:
        MissingInputError: The file does not exist.
        DataError: The file is not a drop list, is damaged, or does not contain this corpus.
    """
    if not path.is_file():
        raise MissingInputError(f"drop list {path}: no such file; {_COMMANDS} writes one")
    end, corpora = _read_header(path)
    match, manifest = None, corpus.manifest
    for entry in corpora:
        begin, end = end, end + -(-entry.documents // 8)
        if entry.documents_sha256 == manifest.documents_sha256 and entry.documents == manifest.documents:
            match = entry, begin, end
    if (size := path.stat().st_size) != end:
        raise DataError(
            f"drop list {path}: expected {end:,} bytes for {len(corpora)} corpora, found {size:,}; {_DAMAGED}"
        )
    if match is None:
        names = ", ".join(f"{entry.prefix} ({entry.documents_sha256[:12]})" for entry in corpora[:5])
        raise DataError(
            f"drop list {path} is for {names}, but {corpus.prefix} is {manifest.documents_sha256[:12]}: another "
            f"corpus, or written again since; run {_COMMANDS} on it"
        )
    entry, begin, end = match
    mask: NDArray[np.uint8] = np.memmap(path, np.uint8, "r", begin, end - begin)
    if hashlib.sha256(mask.data).hexdigest() != entry.mask_sha256:
        raise DataError(f"drop list {path}: expected sha256 {entry.mask_sha256} of its bits; {_DAMAGED}")
    return entry, mask


def _read_header(path: Path) -> tuple[int, list[DropListEntry]]:
    """Return the size of the header in bytes, and its entries. Raise DataError if the file is not a drop list."""
    with path.open("rb") as stream:
        header = stream.readline(_LONGEST_HEADER_BYTES)
    try:
        return len(header), msgspec.convert(parse_json(header), _Header).corpora
    except (ValueError, msgspec.ValidationError) as error:
        raise DataError(
            f"{path} is not a drop list: its first line is not JSON with the format {_FORMAT!r} ({error!r:.200}); name "
            f"a file that {_COMMANDS} has written"
        ) from error


def refuse_other_file(path: Path) -> None:
    """Raise OutputError if the path exists and is not a drop list. Only drop lists are replaced."""
    try:
        is_drop_list = path.is_file() and not path.is_symlink() and bool(_read_header(path))
    except DataError:
        is_drop_list = False
    if os.path.lexists(path) and not is_drop_list:
        raise OutputError(f"--output {path} exists and is not a drop list, so it is not replaced; name another file")


def write_drop_list(
    path: Path, corpora: Sequence[Corpus], is_dropped: NDArray[np.bool_], settings: dict[str, Any], *, folder: Path
) -> list[DropListEntry]:
    """Write a drop list, replacing an existing file atomically, and return its entries, one per corpus.

    Args:
        is_dropped: One value per document, one corpus after the other.
        settings: JSON values for the header that record how the list was made.
        folder: Folder for the unfinished file. A killed run may leave the file there.
    """
    of_corpora = np.split(is_dropped, np.cumsum([len(corpus) for corpus in corpora])[:-1])
    masks = [np.packbits(of_corpus, bitorder="little") for of_corpus in of_corpora]
    entries = [
        DropListEntry(
            prefix=str(corpus.prefix),
            documents_sha256=corpus.manifest.documents_sha256,
            documents=len(corpus),
            dropped_documents=int(np.count_nonzero(of_corpus)),
            mask_sha256=hashlib.sha256(mask.data).hexdigest(),
        )
        for corpus, of_corpus, mask in zip(corpora, of_corpora, masks, strict=True)
    ]
    header = json.dumps({"format": _FORMAT, **settings, "corpora": msgspec.to_builtins(entries)})
    with replacing(path, folder=folder) as temporary, temporary.open("wb") as stream:
        stream.write(header.encode() + b"\n")
        for mask in masks:
            stream.write(mask.data)
    return entries
