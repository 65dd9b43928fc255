"""A command that gets another kind of folder says which, and the command that makes the right one of it."""

from pathlib import Path

import pytest
from commands import call


@pytest.fixture
def places(tiny_corpus, tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "run" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "run" / "iter_0000002" / "MANIFEST.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return {"run": tmp_path / "run", "model": tmp_path / "model", "corpus": Path(tiny_corpus.prefix)}


TO_HF = "it is the --save folder of a run; convert its newest checkpoint: neobert convert megatron-to-hf"
TO_MEGATRON = "it is a Hugging Face folder; make a checkpoint of it: neobert convert hf-to-megatron"


@pytest.mark.parametrize(
    ("command", "kind", "remedy"),
    [
        ("evaluate throughput --output {out} --model", "run", TO_HF),
        ("convert hf-to-megatron --output {out} --load", "run", TO_HF),
        ("evaluate throughput --output {out} --model", "run/iter_0000002", "it is a checkpoint; convert it"),
        ("evaluate ner --data-dir . --output {out} --model", "run/iter_0000002", "it is a checkpoint; convert it"),
        ("evaluate ppl --data . --output {out} --model", "run", TO_HF),
        ("train-embedder --data-dir . --output {out} --model", "run", TO_HF),
        ("convert megatron-to-hf --output {out} --load", "model", TO_MEGATRON),
        ("replay --iteration 1 --load", "model", TO_MEGATRON),
        (
            "preprocess --input {out} --output-prefix {out} --tokenizer-model",
            "corpus",
            "a corpus, which --data-path reads",
        ),
    ],
)
def test_wrong_kind_of_folder_is_recognised(command, kind, remedy, places, tmp_path):
    first, _, rest = kind.partition("/")
    words = [word.format(out=tmp_path / "out") for word in command.split()]
    number = 1 if words[1].startswith("--") else 2
    code, _, errors = call(" ".join(words[:number]), *words[number:], places[first] / rest)
    assert (code, remedy in errors) == (66, True), errors
    assert "no such folder" not in errors, "the folder exists"


@pytest.mark.parametrize(
    "ending", ["", "_text_document", "_document", "_content_document.bin", "_content_document.json"]
)
def test_prefix_of_preprocess_a_file_of_the_corpus_or_another_key_names_the_corpus(ending, tiny_corpus):
    prefix = tiny_corpus.prefix.removesuffix("_content_document") + ending
    code, _, errors = call("train", "--data-path", prefix, "--tokenizer-model", tiny_corpus.tokenizer, "--dry-run")
    assert (code, f"did you mean {tiny_corpus.prefix}?" in errors) == (66, True), errors


@pytest.mark.parametrize(("name", "is_of_a_corpus"), [("my.json", False), ("model", False), ("{corpus}", True)])
def test_tokenizer_that_does_not_exist_is_called_a_corpus_only_if_it_is_one(name, is_of_a_corpus, places, tmp_path):
    path = tmp_path / name.format(corpus=places["corpus"])
    command = ("--input", tmp_path / "out", "--output-prefix", tmp_path / "out", "--tokenizer-model", path)
    code, _, errors = call("preprocess", *command)
    assert code == 66 and f"--tokenizer-model {path}" in errors
    assert ("a corpus" in errors, "convert" in errors) == (is_of_a_corpus, False), errors
