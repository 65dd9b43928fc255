"""Chunks of made-up documents, and the corpora that are written from them."""

import zlib

import numpy as np
from unit.data.small_corpus import FIRST_ORDINARY, numbered_tokenizer, write_chunk

from megatron_neobert.data.corpus.attribute_columns import pack_columns
from megatron_neobert.data.corpus.format import FileRecord, corpus_files
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.data.corpus.writer import write_corpus
from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.runtime.atomic_files import sha256_of

TOKENIZER = numbered_tokenizer(100)
UNKNOWN = 1


class ChunkFolder:
    """A folder with chunks of made-up documents in P.partial, from which `write` makes the corpus P.

    Args:
        folder: The folder.
        inputs: For each input file, the number of documents of each of its chunks.
        ids_seed: Another seed gives documents with the same lengths and other ids.
    """

    def __init__(self, folder, *, inputs=((3, 2), (4,), (0,), (5, 0, 6)), ids_seed=0):
        generator = np.random.default_rng(0)
        self.folder, self.files = folder, corpus_files(folder / "P")
        self.files.partial.mkdir(parents=True)
        self.texts, self.documents, self.chunks = [], [], []
        for number, sizes in enumerate(inputs):
            for size in sizes:
                texts = [f"text {number}" for number in generator.integers(0, 15, size)]
                documents = [self._document(text, ids_seed) for text in texts]
                rejects = f'{{"chunk": {len(self.chunks)}}}\n' if size % 2 else ""
                self.add_chunk(documents, texts, input=f"input {number}", rejects=rejects)
                self.texts += texts
                self.documents += documents

    def add_chunk(self, documents, texts, *, input, rejects=""):
        """Add a chunk whose documents have the length of their text as an attribute."""
        chunk = write_chunk(self.files.partial, len(self.chunks), documents, TOKENIZER, input=input, rejects=rejects)
        file = self.files.partial / f"{chunk.result.name}.attributes"
        file.write_bytes(pack_columns({"characters": list(map(len, texts))}))
        chunk.files["attributes"] = FileRecord(file.stat().st_size, sha256_of(file))
        if not self.chunks:
            chunk.result.counts.rejected["malformed JSON"], chunk.result.counts.dropped["empty text"] = 2, 1
        self.chunks.append(chunk)

    @staticmethod
    def _document(text, ids_seed):
        """Return 1 to 8 ids, some of them unknown; the text decides the number."""
        seed = zlib.crc32(text.encode())
        length = np.random.default_rng(seed).integers(1, 9)
        generator = np.random.default_rng([seed, ids_seed])
        ids = generator.integers(FIRST_ORDINARY, 100, length)
        return np.where(generator.random(length) < 0.3, UNKNOWN, ids).tolist()

    def write(self, **options):
        return write_corpus(self.chunks, self.files, TOKENIZER, text_key="content", filters={}, **options)

    def corpus_bytes(self):
        return {file.name: file.read_bytes() for file in self.folder.glob("P*") if file.is_file()}


def documents_of(prefix):
    corpus = Corpus(prefix)
    check_content(corpus)
    return [corpus.document(number).tolist() for number in range(len(corpus))]


def documents_if_it_opens(prefix):
    """Return the documents of a corpus, which must be sound; None if there is no corpus or opening it fails."""
    try:
        Corpus(prefix)
    except (MissingInputError, DataError):
        return None
    return documents_of(prefix)
