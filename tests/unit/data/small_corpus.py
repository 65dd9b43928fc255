"""A made-up tokenizer and corpora with given ids, for tests that need a corpus on disk."""

import hashlib
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from msgspec.structs import replace
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from megatron_neobert.data.corpus import writer
from megatron_neobert.data.corpus.format import (
    Counts,
    FileRecord,
    Manifest,
    corpus_files,
    read_manifest,
    token_dtype,
    write_manifest,
)
from megatron_neobert.data.corpus.writer import TokenizedChunk, refuse_existing
from megatron_neobert.data.tokenizer.files import build_bert_backend
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.runtime.jobs import Finished

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
FIRST_ORDINARY = len(SPECIAL)


def write_vocabulary(path: Path, pieces: Sequence[str]) -> Path:
    """Write a vocab.txt in which the five special tokens have ids 0 to 4 and the pieces follow."""
    path.write_text("".join(f"{piece}\n" for piece in (*SPECIAL, *pieces)), encoding="utf-8")
    return path


def numbered_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer whose id 5 is the word "w5", and so on."""
    vocabulary = {piece: id_ for id_, piece in enumerate((*SPECIAL, *(f"w{id_}" for id_ in range(5, vocab_size))))}
    backend = build_bert_backend(models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase=True)
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, {name.strip("[]").lower(): name for name in SPECIAL})


def byte_level_backend(special: Sequence[str] = ROBERTA) -> tokenizers.Tokenizer:
    """Return a byte-level BPE without merges, with special tokens first as in RoBERTa and ModernBERT."""
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    return backend


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text."""
    return [ids.tolist() for ids in tokenizer.encode_batch(texts).split()]


def write_chunk(
    folder: Path,
    number: int,
    documents: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    *,
    input: str = "shard",
    rejects: str = "",
) -> Finished[TokenizedChunk]:
    """Write the files of a finished chunk with these documents."""
    name, dtype = f"{number:06d}", token_dtype(tokenizer.vocab_size)
    flat = np.array([id_ for document in documents for id_ in document], dtype=np.int64).astype(dtype)
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    content = {"ids": flat.tobytes(), "lengths": lengths.tobytes()}
    for kind, data in {**content, "rejects": rejects.encode()}.items():
        (folder / f"{name}.{kind}").write_bytes(data)
    counts = Counts(len(documents), flat.size, int((flat == tokenizer.unk_id).sum()))
    files = {kind: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for kind, data in content.items()}
    return Finished("", files, TokenizedChunk(name, input, 1, None, counts))


def write_corpus(
    prefix: Path,
    documents: Sequence[Sequence[int]],
    tokenizer: Tokenizer | None = None,
    *,
    overwrite: bool = False,
    shard_bytes: int | None = None,
    inputs: Sequence[str] | None = None,
) -> Manifest:
    """Write a corpus of these documents: one chunk, or one chunk per document if `shard_bytes` is given.

    Args:
        tokenizer: None for a vocabulary of 100 ids.
        inputs: Name of the input file of each chunk.
    """
    files, tokenizer = corpus_files(prefix), tokenizer or numbered_tokenizer(100)
    refuse_existing(files, overwrite=overwrite)
    files.partial.mkdir()
    groups = [documents] if shard_bytes is None else [[document] for document in documents]
    inputs = inputs or ["shard"] * len(groups)
    chunks = [
        write_chunk(files.partial, number, group, tokenizer, input=inputs[number])
        for number, group in enumerate(groups)
    ]
    manifest = writer.write_corpus(chunks, files, tokenizer, shard_bytes=shard_bytes, text_key="content", filters={})
    shutil.rmtree(files.partial)
    return manifest


def write_attributes(prefix: Path, columns: Mapping[str, Any] | pa.Table, *, rows: int | None = None) -> Path:
    """Add attributes to a corpus on disk, in row groups of `rows` documents."""
    files = corpus_files(prefix)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, files.attributes, row_group_size=rows, write_page_checksum=True)
    record = FileRecord(files.attributes.stat().st_size, sha256_of(files.attributes))
    write_manifest(files.manifest, replace(read_manifest(files.manifest), attributes=record))
    return files.attributes


def documents_in(bits: NDArray[np.uint8], documents: int) -> list[int]:
    """Return the numbers of the documents whose bit is set."""
    return np.flatnonzero(np.unpackbits(bits, count=documents, bitorder="little")).tolist()


def random_documents(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[NDArray[np.int64]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(FIRST_ORDINARY, vocab_size, length) for length in lengths]


# Ways to damage a file. Each returns a function that changes the content in place, or returns the new content.


def damage(path, change):
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content) or content)


def put(form, offset, *values):
    def change(content):
        struct.pack_into(form, content, offset, *values)

    return change


def cut(length):
    def change(content):
        del content[length:]

    return change


def replaced(*pairs):
    def change(content):
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            assert old in content
            content = content.replace(old, new)
        return content

    return change
