"""What training opens: one corpus cut in two, or one for training and one for validation."""

import pytest
from preprocess_place import Place
from small_corpus import write_vocabulary

from megatron_neobert.config import DataConfig
from megatron_neobert.data.inputs import open_inputs
from megatron_neobert.errors import DataError, MissingInputError


@pytest.fixture
def place(tmp_path):
    """Two corpora of one tokenizer: `run` for training, and what --split-validation holds out of it."""
    place = Place(tmp_path)
    place.add_texts("a.jsonl", *("hello " * count for count in range(1, 201)))
    place.run(split_validation=0.2)
    return place


def settings(place, **changes):
    prefix = str(place.folder / "out" / "run_content_document")
    return DataConfig(**{"data_path": prefix, "tokenizer_model": str(place.vocab), **changes})


def test_one_corpus_is_cut_into_training_and_validation(place):
    inputs = open_inputs(settings(place, split="3,1"))
    documents = len(place.corpus())
    boundary = round(documents * 3 / 4)
    assert inputs.training_documents == range(boundary)
    assert inputs.validation == (inputs.corpus, range(boundary, documents))


def test_corpus_for_validation_leaves_all_of_the_other_for_training(place):
    held_out = place.corpus(end="_validation")
    inputs = open_inputs(settings(place, valid_data_path=str(held_out.prefix), split="3,1"))
    assert inputs.training_documents == range(len(place.corpus()))
    corpus, documents = inputs.validation
    assert documents == range(len(held_out))
    assert corpus.manifest == held_out.manifest != inputs.corpus.manifest
    assert len(inputs.corpus) + len(corpus) == 200


def test_corpus_for_validation_needs_the_same_tokenizer_and_must_exist(place):
    with pytest.raises(MissingInputError, match=r"no corpus .*nowhere"):
        open_inputs(settings(place, valid_data_path=str(place.folder / "nowhere")))
    (place.folder / "other").mkdir()
    other = Place(place.folder / "other")
    write_vocabulary(other.vocab, ["hello"])
    other.add_texts("a.jsonl", "hello")
    other.run()
    with pytest.raises(DataError, match="was written with tokenizer"):
        open_inputs(settings(place, valid_data_path=str(other.corpus().prefix)))


def test_type_of_the_tokenizer_decides_as_in_preprocessing(place):
    place.run("cased", tokenizer_type="BertWordPieceCase")
    cased = {"data_path": str(place.folder / "out" / "cased_content_document")}
    with pytest.raises(DataError, match="was written with tokenizer"):
        open_inputs(settings(place, **cased))
    assert open_inputs(settings(place, **cased, tokenizer_type="BertWordPieceCase")).tokenizer.vocab_size > 0
