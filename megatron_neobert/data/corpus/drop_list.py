"""A drop list: which documents of one or more finished corpora are to be left out, one bit per document.

The file begins with a line of JSON about itself (`head -n 1`); the bits of each corpus follow, document 0 first, each
corpus from a byte of its own. It names corpora by their content, so it serves any copy of a corpus and no other.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import Manifest
from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.runtime.atomic_files import replacing
from megatron_neobert.text import parse_json

_FORMAT = "megatron_neobert drop list 1"
_DAMAGED = "it is damaged; copy it again, or run neobert find-duplicates again"
_LONGEST_HEADER = 1 << 24  # bytes; 300 for each of the corpora


@dataclass(frozen=True)
class DroppedOf:
    """Documents of one corpus that a drop list leaves out."""

    prefix: str  # as it was given; it may have moved
    documents_sha256: str  # of the manifest
    documents: Annotated[int, msgspec.Meta(ge=1)]
    tokens: int
    dropped_documents: int
    dropped_tokens: int
    mask_sha256: str  # of the corpus's bits, in whole bytes


class _Header(msgspec.Struct):
    format: Literal["megatron_neobert drop list 1"]
    corpora: list[DroppedOf]


def read_drop_list(path: Path, manifest: Manifest, prefix: Path | str) -> tuple[DroppedOf, NDArray[np.uint8]]:
    """Return what a drop list takes from one corpus, called `prefix`: its entry, and one bit per document, mapped.

    Raises:
        MissingInputError: No such file.
        DataError: The file is no drop list, is damaged, or has no entry for this corpus.
    """
    if not path.is_file():
        raise MissingInputError(f"drop list {path}: no such file; neobert find-duplicates writes one")
    with path.open("rb") as stream:
        header = stream.readline(_LONGEST_HEADER)
    try:
        corpora = msgspec.convert(parse_json(header), _Header).corpora
    except (ValueError, msgspec.ValidationError) as error:
        raise DataError(
            f"{path} is not a drop list that begins with a line of JSON and {_FORMAT!r} ({error!r:.200}); name the "
            "file that neobert find-duplicates has written"
        ) from error
    offset, found = len(header), None
    for entry in corpora:
        mask_bytes = -(-entry.documents // 8)
        if entry.documents_sha256 == manifest.documents_sha256 and entry.documents == manifest.documents:
            found = entry, offset, mask_bytes
        offset += mask_bytes
    if (size := path.stat().st_size) != offset:
        raise DataError(
            f"drop list {path}: expected {offset:,} bytes for {len(corpora)} corpora, found {size:,}; {_DAMAGED}"
        )
    if found is not None:
        entry, offset, mask_bytes = found
        mask: NDArray[np.uint8] = np.memmap(path, np.uint8, "r", offset, mask_bytes)
        if hashlib.sha256(mask.data).hexdigest() != entry.mask_sha256:
            raise DataError(f"drop list {path}: expected sha256 {entry.mask_sha256} of its bits; {_DAMAGED}")
        return entry, mask
    names = ", ".join(f"{entry.prefix} ({entry.documents_sha256[:12]})" for entry in corpora[:5])
    raise DataError(
        f"drop list {path} is of {names}, but {prefix} is {manifest.documents_sha256[:12]}: another corpus, or "
        "written anew since; run neobert find-duplicates on it"
    )


def write_drop_list(
    path: Path, corpora: Sequence[tuple[str, Manifest, NDArray[np.bool_], int]], found: dict[str, Any]
) -> list[DroppedOf]:
    """Write a drop list, whole or not at all, and return its entries.

    Args:
        corpora: Prefix, manifest, True for each document that is dropped, and the tokens in these.
        found: More about it, for people; must survive JSON.
    """
    masks = [np.packbits(dropped, bitorder="little") for _, _, dropped, _ in corpora]
    entries = [
        DroppedOf(
            prefix=prefix,
            documents_sha256=manifest.documents_sha256,
            documents=manifest.documents,
            tokens=manifest.tokens,
            dropped_documents=int(np.count_nonzero(dropped)),
            dropped_tokens=tokens,
            mask_sha256=hashlib.sha256(mask.data).hexdigest(),
        )
        for (prefix, manifest, dropped, tokens), mask in zip(corpora, masks, strict=True)
    ]
    header = json.dumps({"format": _FORMAT, **found, "corpora": msgspec.to_builtins(entries)})
    with replacing(path) as temporary, temporary.open("wb") as stream:
        stream.write(header.encode() + b"\n")
        for mask in masks:
            stream.write(mask.data)
    return entries
