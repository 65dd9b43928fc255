"""--tokenizer-type selects the file of a folder, and a file of another type is refused."""

import pytest
from security.small_sentencepiece import write_model
from unit.data.small_corpus import byte_level_backend, write_vocabulary

from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConfigError

UNCASED = [*"abcdehlorw", "hello", "##s"]
CASED = [*UNCASED, "Hello", "World"]


@pytest.fixture
def uncased(tmp_path):
    return write_vocabulary(tmp_path / "vocab.txt", UNCASED)


@pytest.fixture
def cased(tmp_path):
    (tmp_path / "cased").mkdir()
    return write_vocabulary(tmp_path / "cased/vocab.txt", CASED)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(id_) for id_ in tokenizer.encode_batch([text]).ids.tolist()]


def test_bert_type_determines_the_case_of_an_uncased_vocabulary(uncased, cased):
    assert pieces(load_tokenizer(uncased, "BertWordPieceLowerCase"), "Hello") == ["hello"]
    assert pieces(load_tokenizer(uncased, "BertWordPieceCase"), "Hello hello") == ["[UNK]", "hello"]
    assert pieces(load_tokenizer(cased, "BertWordPieceCase"), "Hello") == ["Hello"]


def test_type_that_contradicts_the_vocabulary_or_its_configuration_is_refused(uncased, cased):
    with pytest.raises(ConfigError, match=r"LowerCase .*: 2 of 19 pieces have upper-case letters \('Hello'\)"):
        load_tokenizer(cased, "BertWordPieceLowerCase")
    (uncased.parent / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ConfigError, match=r"Case contradicts .*tokenizer_config\.json.* do_lower_case true"):
        load_tokenizer(uncased, "BertWordPieceCase")


def test_folder_gives_vocab_txt_to_bert_types_and_tokenizer_json_to_the_others(uncased, cased):
    load_tokenizer(cased).save_tokenizer_files(uncased.parent, model_max_length=16)  # both files, of two vocabularies
    write_vocabulary(uncased, UNCASED)
    (uncased.parent / "tokenizer_config.json").unlink()
    folder = uncased.parent
    for name in ("auto", "HuggingFaceTokenizer"):
        assert load_tokenizer(folder, name).vocab_size == 5 + len(CASED)
    assert load_tokenizer(folder, "BertWordPieceLowerCase").vocab_size == 5 + len(UNCASED)


def save_json(path, backend):
    backend.save(str(path))
    return path


def test_file_of_another_type_is_refused_with_the_types_that_fit(uncased, tmp_path):
    json_path = save_json(tmp_path / "tokenizer.json", byte_level_backend())
    model = write_model(tmp_path / "tokenizer.model")
    refused = [
        (uncased, "HuggingFaceTokenizer", r"is a WordPiece vocabulary; use auto, BertWordPieceLowerCase or"),
        (uncased, "SentencePieceTokenizer", r"is a WordPiece vocabulary"),
        (json_path, "SentencePieceTokenizer", r"is a tokenizer\.json; use auto, HuggingFaceTokenizer"),
        (json_path, "BertWordPieceCase", r"is a tokenizer\.json"),
        (model, "BertWordPieceLowerCase", r"is a SentencePiece model; use auto, SentencePieceTokenizer"),
        (model, "HuggingFaceTokenizer", r"is a SentencePiece model"),
    ]
    for path, name, message in refused:
        with pytest.raises(ConfigError, match=rf"--tokenizer-type {name} does not fit .*{path.name}.*{message}"):
            load_tokenizer(path, name)
        assert load_tokenizer(path)  # control: auto reads it


def test_sentencepiece_model_is_recognised_by_its_content_and_taken_from_a_folder(tmp_path):
    model = write_model(tmp_path / "spm.bin")
    assert load_tokenizer(model).special_tokens["cls"] == 1
    model.rename(tmp_path / "spiece.model")
    assert load_tokenizer(tmp_path, "SentencePieceTokenizer").fingerprint == load_tokenizer(tmp_path).fingerprint
