"""A made-up tokenizer and corpora of given ids, for tests that need a corpus on disk."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import models

from megatron_neobert.data.corpus_format import Manifest, corpus_files
from megatron_neobert.data.corpus_writer import CorpusWriter
from megatron_neobert.data.tokenizer import Tokenizer
from megatron_neobert.data.tokenizer_files import build_bert_backend

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FIRST_ORDINARY = len(SPECIAL)


def write_vocabulary(path: Path, pieces: Sequence[str]) -> Path:
    """A vocab.txt: the five special tokens are ids 0 to 4, the pieces follow."""
    path.write_text("".join(f"{piece}\n" for piece in (*SPECIAL, *pieces)), encoding="utf-8")
    return path


def numbered_tokenizer(vocab_size: int) -> Tokenizer:
    """Knows the words "w5", "w6" ... by their ids."""
    vocabulary = {piece: id_ for id_, piece in enumerate((*SPECIAL, *(f"w{id_}" for id_ in range(5, vocab_size))))}
    backend = build_bert_backend(models.WordPiece(vocabulary, unk_token="[UNK]"), lowercase=True)
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, {name.strip("[]").lower(): name for name in SPECIAL})


def write_corpus(
    prefix: Path, documents: Sequence[Sequence[int]], tokenizer: Tokenizer, *, overwrite: bool = False
) -> Manifest:
    with CorpusWriter(corpus_files(prefix), tokenizer, overwrite=overwrite) as writer:
        ids, lengths, rejects = (writer.folder / name for name in ("a.ids", "a.lengths", "a.rejects"))
        np.concatenate(documents).astype(writer.dtype).tofile(ids)
        np.array([len(document) for document in documents], dtype=np.int32).tofile(lengths)
        rejects.touch()
        writer.append_part(ids, lengths, rejects)
        return writer.commit(inputs={}, text_key="content", unknown_tokens=0, repaired_documents=0, rejected={})
