"""The corpus of real books has the ids of Hugging Face's tokenizer, document by document."""

import os

import pyarrow.parquet as pq
import pytest
from unit.data.preprocess_workspace import Workspace

EVERY = int(os.environ.get("EVERY", "40"))  # EVERY=1 compares all 18,900 documents, which takes half a minute


def test_books_preprocessed_with_nanotoken_have_the_ids_of_transformers(shared_data, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("nanotoken")
    workspace = Workspace(tmp_path)
    workspace.vocab = shared_data / "tokenizers/bert-base-uncased/vocab.txt"
    texts = []
    for file in sorted((shared_data / "text/books").glob("*.parquet")):
        rows = pq.read_table(file)
        rows = rows.take(list(range(0, len(rows), EVERY)))
        pq.write_table(rows, workspace.inputs / file.name)
        texts += rows["content"].to_pylist()
    workspace.run(tokenizer_backend="fast")
    (name,) = workspace.corpus().manifest.tokenizer_backends
    assert name.startswith("nanotoken")
    theirs = transformers.BertTokenizer(str(workspace.vocab), do_lower_case=True)
    corpus = workspace.corpus()
    assert len(corpus) == len(texts) >= 18_900 // EVERY
    mismatches = 0
    for first in range(0, len(texts), 500):
        encoded = theirs(texts[first : first + 500], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        mismatches += sum(corpus.document(number).tolist() != ids for number, ids in enumerate(encoded, start=first))
    assert mismatches == 0
    assert corpus.document(0).tolist() != theirs(texts[1], add_special_tokens=False)["input_ids"]
