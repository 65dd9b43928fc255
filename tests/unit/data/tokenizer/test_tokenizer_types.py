"""The type of a tokenizer is recognised by its file."""

from security.small_sentencepiece import write_model
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

UNCASED = [*"abcdehlorw", "hello", "##s"]
CASED = [*UNCASED, "Hello", "World"]


def test_folder_gives_tokenizer_json_before_vocab_txt(tmp_path):
    (tmp_path / "cased").mkdir()
    cased = load_tokenizer(write_vocabulary(tmp_path / "cased/vocab.txt", CASED))
    cased.save_tokenizer_files(tmp_path, model_max_length=16)
    write_vocabulary(tmp_path / "vocab.txt", UNCASED)
    assert load_tokenizer(tmp_path).vocab_size == 5 + len(CASED)


def test_sentencepiece_model_is_recognised_by_its_content_and_taken_from_a_folder(tmp_path):
    model = write_model(tmp_path / "spm.bin")
    loaded = load_tokenizer(model)
    assert loaded.special_tokens["cls"] == 1
    model.rename(tmp_path / "spiece.model")
    assert load_tokenizer(tmp_path).fingerprint == loaded.fingerprint
