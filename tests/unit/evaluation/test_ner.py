"""Named-entity recognition: file formats, labels of tokens, scores, and a whole evaluation."""

import random
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
import torch
import transformers
from json_files import read_json
from seqeval.metrics import f1_score
from unit.evaluation.glue_inputs import one_point
from unit.evaluation.pseudo_perplexity_models import write_model

from megatron_neobert.errors import ConversionError, DataError
from megatron_neobert.evaluation.data import Rows
from megatron_neobert.evaluation.models import load_tokenizer
from megatron_neobert.evaluation.ner import NerTask, encode_sentences, find_datasets, read_dataset, run_ner, to_tags
from megatron_neobert.evaluation.options import NerOptions

TAGS = ("O", "B-ANIMAL", "I-ANIMAL", "B-THING")
SENTENCES = [
    (["the", "cat", "mat", "sat"], ["O", "B-ANIMAL", "I-ANIMAL", "O"]),
    (["a", "mat"], ["O", "B-THING"]),
]
SPLITS = {"train": SENTENCES, "dev": SENTENCES}


def draw(count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    """Return sentences that a small model learns: every cat is an animal, and every mat is a thing."""
    rng, tags = random.Random(seed), {"cat": "B-ANIMAL", "mat": "B-THING"}
    sentences = [rng.choices(["the", "cat", "mat", "sat", "on", "a"], k=6) for _ in range(count)]
    return [(words, [tags.get(word, "O") for word in words]) for words in sentences]


def write_text(folder, splits, *, suffix=".txt", separator=" ", newline="\n", header=""):
    folder.mkdir(parents=True, exist_ok=True)
    for split, sentences in splits.items():
        blocks = [[f"{word}{separator}{tag}" for word, tag in zip(*sentence, strict=True)] for sentence in sentences]
        text = (newline * 2).join([header, *(newline.join(block) for block in blocks)])
        (folder / f"{split}{suffix}").write_text(text + newline, newline="")


def write_parquet(folder):
    """Write tags as numbers with names, as the Hub does."""
    folder.mkdir(parents=True)
    features = {"tokens": datasets.Sequence(datasets.Value("string"))}
    features["ner_tags"] = datasets.Sequence(datasets.ClassLabel(names=list(TAGS)))
    columns = {"tokens": [words for words, _ in SENTENCES]}
    columns["ner_tags"] = [[TAGS.index(tag) for tag in tags] for _, tags in SENTENCES]
    dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    for split in ("train-00000-of-00001", "validation"):
        dataset.to_parquet(folder / f"{split}.parquet")


FORMATS = {
    "CoNLL 2003": lambda folder: write_text(
        folder,
        {"eng.train": SENTENCES, "eng.testa": SENTENCES},
        suffix="",
        separator=" NN I-NP ",
        newline="\r\n",
        header="-DOCSTART- -X- -X- O",
    ),
    "WNUT": lambda folder: write_text(folder, SPLITS, suffix=".conll", separator="\t"),
    "Hub": write_parquet,
}


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_gives_the_same_sentences(tmp_path, format_):
    FORMATS[format_](tmp_path / "set" / "en")
    splits = read_dataset(tmp_path, "set/en")
    words, tags = map(list, zip(*SENTENCES, strict=True))
    assert list(splits) == ["train", "validation"]
    assert all((rows.texts, rows.labels) == ([words], tags) for rows in splits.values())
    assert find_datasets(tmp_path) == ["set/en"]


ONE_ANIMAL = "the O\ncat B-ANIMAL\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train": "cat\n"}, "line 1: 'cat' is one field; a line must begin with a word and end with its tag"),
        ({"train": "the O\ncat ANIMAL\n"}, "train row 0: 'ANIMAL' is not a tag"),
        ({"train": {"tokens": [["a"]], "ner_tags": [[1]]}}, "tag 1 has no name, because the file has no tag names"),
        ({"train": {"tokens": [["a", "b"]], "ner_tags": [["O"]]}}, "row 0 has 2 words, but 1 tags"),
        (
            {"train": ONE_ANIMAL, "dev": "cat B-animal\n"},
            "validation has the entity types animal, and train has the entity types ANIMAL",
        ),
        ({"train": ONE_ANIMAL, "dev": "the O\n"}, "has no entities, and train has the entity types ANIMAL"),
        ({"train": "the O\n", "dev": ONE_ANIMAL}, "train has no entities"),
    ],
)
def test_missing_columns_invalid_tags_and_splits_without_a_common_entity_type_are_refused(tmp_path, files, message):
    (tmp_path / "set").mkdir()
    for split, content in files.items():
        if isinstance(content, str):
            (tmp_path / "set" / f"{split}.txt").write_text(content)
        else:
            pyarrow.parquet.write_table(pa.table(content), tmp_path / "set" / f"{split}.parquet")
    with pytest.raises(DataError, match=message):
        read_dataset(tmp_path, "set")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a model, a dataset with a test set, and one without."""
    folder = tmp_path_factory.mktemp("ner")
    write_model(folder / "model", "Bert")
    write_text(folder / "data" / "animals", {"train": draw(96, 0), "dev": draw(32, 1), "test": draw(32, 2)})
    write_text(folder / "data" / "untested", {"train": draw(48, 3), "valid": draw(24, 4)})
    return folder


def byte_level_tokenizer():
    """Return a tokenizer like RoBERTa's and ModernBERT's, for which the space before a word matters."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the cat the cat mat mat"] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("kind", "first_tokens"),
    [
        # The word with index 1 has no token, and the last word none for its first character.
        ("WordPiece", [("the", 0), ("[UNK]", 2), ("mat", 3)]),
        ("byte level", [("the", 0), ("â", 1), ("Ġcat", 2), ("â", 3)]),
    ],
)
def test_first_token_of_a_word_has_its_tag_and_a_word_without_a_token_is_o(inputs, kind, first_tokens):
    words, tags = ["the", "\u200b", "catcat", "\u200bmat"], ["O", "B-THING", "B-ANIMAL", "I-ANIMAL"]
    tokenizer = load_tokenizer(inputs / "model") if kind == "WordPiece" else byte_level_tokenizer()
    encoded = encode_sentences(Rows([[words]], [tags], ""), TAGS, tokenizer, 40)
    (row,) = encoded
    word_of = {token: word for word, token in enumerate(row["word_tokens"]) if token >= 0}
    assert [(tokenizer.decode([row["input_ids"][token]]), word) for token, word in word_of.items()] == first_tokens
    labels = [TAGS.index(tags[word_of[token]]) if token in word_of else -100 for token in range(len(row["labels"]))]
    assert row["labels"] == labels and -100 in labels
    predicted = np.maximum([labels], 0)
    expected = [tag if word in word_of.values() else "O" for word, tag in enumerate(tags)]
    assert to_tags(predicted, encoded, TAGS) == [expected]


def test_words_beyond_the_longest_input_are_predicted_as_o_with_a_warning(inputs):
    with pytest.warns(UserWarning, match="2 words are beyond 4 tokens"):
        words, tags = SENTENCES[0]
        encoded = encode_sentences(Rows([[words]], [tags], ""), TAGS, load_tokenizer(inputs / "model"), 4)
    predicted = np.full((1, 4), TAGS.index("B-THING"))
    assert to_tags(predicted, encoded, TAGS) == [["B-THING", "B-THING", "O", "O"]]


def test_slow_tokenizer_is_refused_before_the_first_run(inputs, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ConversionError, match=r"cannot map words to tokens; add a tokenizer\.json"):
        run_ner(one_point(NerOptions, inputs, output=inputs / "slow"))
    assert not (inputs / "slow").exists()


def test_scores_are_seqevals_for_the_weights_that_are_kept(inputs):
    options = one_point(NerOptions, inputs, epochs=16)
    folder = run_ner(options)
    results = read_json(folder / "ner.json")["results"]["tasks"]
    weights, labels = Path(results["animals"]["kept"]), ("O", "B-ANIMAL", "B-THING")
    task = NerTask("animals", ("train", "validation", "test"), ("f1",), labels)
    model, tokenizer = task.load(weights), load_tokenizer(weights)
    for split, prefix in (("test", "test_"), ("validation", "")):
        encoded = task.encode(split, options, tokenizer, options.max_length)
        with torch.no_grad():
            predicted = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax(-1) for row in encoded]
        expected = f1_score(list(encoded["tags"]), to_tags(predicted, encoded, labels))
        assert results["animals"]["metrics"][f"{prefix}f1"]["mean"] == expected > 0.5
    assert "test_f1" not in results["untested"]["metrics"]
    assert results["animals"]["best_steps"][0] % (96 // 8) == 0, "one evaluation per epoch"
    assert "| animals |" in (folder / "ner.md").read_text()
