"""What a corpus consists of: Megatron's PREFIX.bin (token ids) and PREFIX.idx (lengths), and PREFIX.json, our manifest.

One sequence per document, whole, without special tokens. The manifest is written last, so its absence marks a corpus
that is not finished.

Layout of .idx, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 sequences S, uint64 document
boundaries S + 1, then int32 lengths[S] in tokens, int64 pointers[S] in bytes, int64 boundaries[S + 1] = 0 ... S.
Source: megatron-core 0.16.1 core/datasets/indexed_dataset.py; tests/unit/data/test_corpus.py reads it with that class.
"""

import json
import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import numpy as np

from megatron_neobert.errors import DataError
from megatron_neobert.files import replace_file

FORMAT_VERSION = 1
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
DAMAGED = "the file is damaged or not of this corpus: copy it again or preprocess again"


class CorpusFiles(NamedTuple):
    """Where the parts of a corpus lie; `partial` is the folder of a run that has not finished."""

    bin: Path
    idx: Path
    manifest: Path
    rejects: Path
    partial: Path


def corpus_files(prefix: str | Path) -> CorpusFiles:
    return CorpusFiles(*(Path(f"{prefix}.{end}") for end in ("bin", "idx", "json", "rejects.jsonl", "partial")))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 below 65,500 ids, else int32: the rule that Megatron's own preprocessing follows."""
    return DTYPES[8 if vocab_size < 65500 else 4]


@dataclass(frozen=True)
class FileRecord:
    """A file as it was when the corpus was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a corpus that its .bin and .idx do not say. Says nothing about the run that wrote it."""

    format_version: int
    project_version: str
    inputs: dict[str, FileRecord]  # by path, in the order read
    text_key: str
    tokenizer_fingerprint: str
    vocab_size: int
    special_tokens: dict[str, int]  # by role: "cls", "sep", "pad", "mask", "unk"
    special_ids: list[int]
    dtype: str
    documents: int
    tokens: int
    unknown_tokens: int
    repaired_documents: int  # with U+FFFD in place of invalid UTF-8 or lone surrogates
    rejected: dict[str, int]  # records by reason
    bin: FileRecord
    idx: FileRecord


def read_manifest(path: Path) -> Manifest:
    """Raises DataError where the file is not a manifest of this version."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not a manifest ({error}); {DAMAGED}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{path}: expected format_version {FORMAT_VERSION}, found {version}; preprocess again")
    for field in fields(Manifest):
        kind: Any = dict if field.type is FileRecord else get_origin(field.type) or field.type
        if not isinstance(content.get(field.name), kind):
            raise DataError(
                f"{path}: expected '{field.name}' to be {kind.__name__}, found {content.get(field.name)!r}; {DAMAGED}"
            )
    try:
        records = {name: FileRecord(**content[name]) for name in ("bin", "idx")}
        inputs = {name: FileRecord(**record) for name, record in content["inputs"].items()}
        manifest = Manifest(**{**content, **records, "inputs": inputs})
    except TypeError as error:
        raise DataError(f"{path}: not a manifest ({error}); {DAMAGED}") from error
    special = {*manifest.special_ids, *manifest.special_tokens.values()}
    if "unk" not in manifest.special_tokens or not special <= set(range(manifest.vocab_size)):
        raise DataError(
            f"{path}: special ids {sorted(special)} are not all below vocab_size {manifest.vocab_size}; {DAMAGED}"
        )
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    replace_file(path, json.dumps(asdict(manifest), indent=1, ensure_ascii=False) + "\n")
