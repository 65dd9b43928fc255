"""A command that gets another kind of folder says which, and the command that makes the right one of it."""

import pytest
from commands import call

TO_HF = "it is the --save folder of a run; convert its newest checkpoint: neobert convert megatron-to-hf"
TO_MEGATRON = "it is a Hugging Face folder; make a checkpoint of it: neobert convert hf-to-megatron"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """The working directory, with a --save folder of a run and a Hugging Face folder."""
    for name in ("run/iter_0000002/MANIFEST.json", "model/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "folder", "remedy"),
    [
        ("evaluate throughput --output out --model", "run", TO_HF),
        ("convert hf-to-megatron --output out --load", "run", TO_HF),
        ("evaluate throughput --output out --model", "run/iter_0000002", "it is a checkpoint; convert it"),
        ("evaluate ner --data-dir . --output out --model", "run/iter_0000002", "it is a checkpoint; convert it"),
        ("evaluate ppl --data . --output out --model", "run", TO_HF),
        ("train-embedder --data-dir . --output out --model", "run", TO_HF),
        ("convert megatron-to-hf --output out --load", "model", TO_MEGATRON),
        ("replay --iteration 1 --load", "model", TO_MEGATRON),
    ],
)
def test_wrong_kind_of_folder_is_recognised(command, folder, remedy):
    code, _, errors = call(command, folder)
    assert (code, remedy in errors) == (66, True), errors
    assert "no such folder" not in errors, "the folder exists"


@pytest.mark.parametrize(
    "ending", ["", "_text_document", "_document", "_content_document.bin", "_content_document.json"]
)
def test_prefix_of_preprocess_a_file_of_the_corpus_or_another_key_names_the_corpus(ending, tiny_corpus):
    prefix = tiny_corpus.prefix.removesuffix("_content_document") + ending
    code, _, errors = call("train", "--data-path", prefix, "--tokenizer-model", tiny_corpus.tokenizer, "--dry-run")
    assert (code, f"did you mean {tiny_corpus.prefix}?" in errors) == (66, True), errors


@pytest.mark.parametrize(
    ("name", "remedy"), [("my.json", ""), ("model", ""), ("{corpus}", "a corpus, which --data-path reads")]
)
def test_tokenizer_that_does_not_exist_is_called_a_corpus_only_if_it_is_one(name, remedy, tiny_corpus):
    path = name.format(corpus=tiny_corpus.prefix)
    code, _, errors = call("preprocess --input out --output-prefix out --tokenizer-model", path)
    assert code == 66 and f"--tokenizer-model {path}" in errors
    assert remedy in errors and ("a corpus" in errors, "convert" in errors) == (bool(remedy), False), errors
