"""A drop list: which documents of one or more finished corpora are to be left out, one bit per document.

The file begins with a line of JSON about itself (`head -n 1`); the bits of each corpus follow, document 0 first, each
corpus from a byte of its own. It names corpora by their content, so it serves any copy of a corpus and no other.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import Manifest
from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.runtime.atomic_files import replacing

_FORMAT = "megatron_neobert drop list 1"
_DAMAGED = "it is damaged; copy it again, or run neobert find-duplicates again"
_LONGEST_HEADER = 1 << 24  # bytes; 300 for each of the corpora


@dataclass(frozen=True)
class DroppedOf:
    """What a drop list takes from one corpus."""

    prefix: str  # as it was given; it may have moved
    documents_sha256: str  # of the manifest
    documents: int
    tokens: int
    dropped_documents: int
    dropped_tokens: int
    mask_sha256: str  # of the corpus's bits, in whole bytes


class DropList:
    """The part of a drop list that is about one corpus; its bits are mapped, and stay on disk.

    Args:
        path: Of the file.
        manifest: Of the corpus, for which `prefix` stands in messages.

    Raises:
        MissingInputError: No such file.
        DataError: It is no drop list, is damaged, or knows nothing of this corpus.
    """

    def __init__(self, path: Path, manifest: Manifest, prefix: Path | str) -> None:
        if not path.is_file():
            raise MissingInputError(f"drop list {path}: no such file; neobert find-duplicates writes one")
        with path.open("rb") as stream:
            header = stream.readline(_LONGEST_HEADER)
        try:
            content: dict[str, Any] = json.loads(header)
            if content["format"] != _FORMAT:
                raise ValueError(f"format {str(content['format'])[:80]!r}")
            corpora = [DroppedOf(**entry) for entry in content["corpora"]]
            sizes = [_mask_bytes(int(corpus.documents)) for corpus in corpora]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path} is not a drop list that begins with a line of JSON and {_FORMAT!r} ({error!r:.200}); name the "
                "file that neobert find-duplicates has written"
            ) from error
        expected, size = len(header) + sum(sizes), path.stat().st_size
        if size != expected or min(sizes, default=0) < 1:
            raise DataError(
                f"drop list {path}: expected {expected:,} bytes for {len(sizes)} corpora, found {size:,}; {_DAMAGED}"
            )
        offsets = [len(header) + before for before in accumulate(sizes, initial=0)]
        found = [place for place, one in enumerate(corpora) if one.documents_sha256 == manifest.documents_sha256]
        if not found or corpora[found[0]].documents != manifest.documents:
            names = ", ".join(f"{one.prefix} ({str(one.documents_sha256)[:12]})" for one in corpora[:5])
            raise DataError(
                f"drop list {path} is of {names}, but {prefix} is {manifest.documents_sha256[:12]}: another corpus, or "
                "written anew since; run neobert find-duplicates on it"
            )
        self.of = corpora[found[0]]
        self.mask: NDArray[np.uint8] = np.memmap(path, np.uint8, "r", offsets[found[0]], sizes[found[0]])
        if hashlib.sha256(self.mask.data).hexdigest() != self.of.mask_sha256:
            raise DataError(f"drop list {path}: expected sha256 {self.of.mask_sha256} of its bits; {_DAMAGED}")

    def drops(self, first: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
        """Whether documents first[i] to first[i] + count - 1 are dropped, [len(first), count].

        Args:
            first: All of one remainder by 8.
        """
        begin, skip = first // 8, int(first[0] % 8)
        places = begin[:, None] + np.arange(_mask_bytes(skip + count))
        bits = np.unpackbits(np.take(self.mask, places, mode="clip"), axis=1, bitorder="little")
        return bits[:, skip : skip + count].view(np.bool_)


def write_drop_list(
    path: Path, corpora: Sequence[tuple[str, Manifest, NDArray[np.bool_], int]], found: dict[str, Any]
) -> list[DroppedOf]:
    """Writes a drop list, whole or not at all.

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
    header = json.dumps({"format": _FORMAT, **found, "corpora": [asdict(entry) for entry in entries]})
    with replacing(path) as temporary, temporary.open("wb") as stream:
        stream.write(header.encode() + b"\n")
        for mask in masks:
            stream.write(mask.data)
    return entries


def _mask_bytes(documents: int) -> int:
    return -(-documents // 8)
