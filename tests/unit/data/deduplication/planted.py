"""Real text with near-duplicates planted in it, and exact Jaccard indices to judge by."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from unit.data.small_corpus import write_corpus

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

NGRAM = 5


class Planted(NamedTuple):
    """A corpus, and which of its documents were made of which others."""

    prefix: str
    documents: list[NDArray[np.int64]]
    pairs: list[tuple[int, int, float]]  # earlier and later document, and their Jaccard index

    def shingles(self, number: int) -> set[tuple[int, ...]]:
        ids = self.documents[number].tolist()
        return {tuple(ids[start : start + NGRAM]) for start in range(len(ids) - NGRAM + 1)}


def jaccard(one: set[tuple[int, ...]], other: set[tuple[int, ...]]) -> float:
    return len(one & other) / len(one | other)


def read_books(shared_data: Path, count: int) -> tuple[object, list[NDArray[np.int64]]]:
    """The tokenizer, and the ids of so many passages."""
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "bert-base-uncased" / "vocab.txt")
    shard = sorted((shared_data / "text" / "books").glob("*.parquet"))[0]
    texts = pq.read_table(shard, columns=["content"])["content"][:count].to_pylist()
    encoded = tokenizer.encode_batch([text[:3000] for text in texts])
    return tokenizer, np.split(encoded.ids.astype(np.int64), np.cumsum(encoded.lengths)[:-1])


def plant(folder: Path, shared_data: Path, *, originals: int, copies: int) -> Planted:
    """Passages, and of some a copy with 0 to 25 % of its shingles replaced, cut off or put in, all in random order."""
    tokenizer, documents = read_books(shared_data, originals)
    generator = np.random.default_rng(0)
    documents = [document for document in documents if len(document) >= 60]
    sources = generator.choice(len(documents), copies, replace=False)
    made = []
    for source in sources.tolist():
        ids, share = documents[source].copy(), generator.uniform(0, 0.25)
        at = generator.integers(0, len(ids), int(share * len(ids) / NGRAM))
        ids[at] = generator.integers(2000, 20000, len(at))
        ids = np.insert(ids, generator.integers(0, len(ids)), generator.integers(2000, 20000, 3))
        made.append(ids[: len(ids) - int(share * len(ids) / 4)])
    order = generator.permutation(len(documents) + copies)
    place = np.argsort(order).tolist()  # of each in the corpus
    both = [*documents, *made]
    shuffled = [both[number] for number in order.tolist()]
    write_corpus(folder / "planted", shuffled, tokenizer)
    planted = Planted(str(folder / "planted"), shuffled, [])
    for copy, source in enumerate(sources.tolist()):
        earlier, later = sorted((place[source], place[len(documents) + copy]))
        alike = jaccard(planted.shingles(earlier), planted.shingles(later))
        planted.pairs.append((earlier, later, alike))
    return planted
