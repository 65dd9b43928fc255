"""The corpus of real books has, document by document, the ids that Hugging Face's tokenizer gives."""

import os

import pyarrow.parquet as pq
import pytest
from unit.data.preprocess_place import Place

EVERY = int(os.environ.get("EVERY", "40"))  # EVERY=1 compares all 18,900 documents, which takes half a minute


@pytest.mark.parametrize("backend", ["fast", pytest.param("reference", marks=pytest.mark.slow)])
def test_books_have_the_ids_of_transformers(shared_data, tmp_path, backend):
    transformers = pytest.importorskip("transformers")
    if backend == "fast":
        pytest.importorskip("nanotoken")
    place = Place(tmp_path)
    place.vocab = shared_data / "tokenizers/bert-base-uncased/vocab.txt"
    texts = []
    for shard in sorted((shared_data / "text/books").glob("*.parquet")):
        rows = pq.read_table(shard)
        rows = rows.take(list(range(0, len(rows), EVERY)))
        pq.write_table(rows, place.shards / shard.name)
        texts += rows["content"].to_pylist()
    place.run(tokenizer_backend=backend)
    (name,) = place.corpus().manifest.tokenizer_backends
    assert name.startswith("nanotoken") == (backend == "fast")
    theirs = transformers.BertTokenizer(str(place.vocab), do_lower_case=True)
    corpus = place.corpus()
    assert len(corpus) == len(texts) >= 18_900 // EVERY
    mismatches = 0
    for first in range(0, len(texts), 500):
        encoded = theirs(texts[first : first + 500], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        mismatches += sum(corpus.document(number).tolist() != ids for number, ids in enumerate(encoded, start=first))
    assert mismatches == 0
    assert corpus.document(0).tolist() != theirs(texts[1], add_special_tokens=False)["input_ids"]
