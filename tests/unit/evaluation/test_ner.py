"""Named-entity recognition: files of every form, first tokens of words, scores, and a whole evaluation."""

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
from seqeval.metrics import f1_score
from unit.evaluation.pseudo_perplexity_models import write_model

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.fine_tune import PaperTrainer, Point, Run
from megatron_neobert.evaluation.ledger import read_record
from megatron_neobert.evaluation.models import LoadOptions, load_tokenizer
from megatron_neobert.evaluation.ner import (
    NerTask,
    Sentence,
    evaluate,
    find_data_sets,
    read_sentences,
    to_rows,
)
from megatron_neobert.evaluation.options import NerOptions

TAGS = ("O", "B-ANIMAL", "I-ANIMAL", "B-THING")
SENTENCES = [
    Sentence(["the", "cat", "mat", "sat"], ["O", "B-ANIMAL", "I-ANIMAL", "O"]),
    Sentence(["a", "mat"], ["O", "B-THING"]),
]


def draw(count: int, seed: int) -> list[Sentence]:
    """A cat is an animal, and a mat is one's second word or a thing, which a small model learns."""
    rng, sentences = random.Random(seed), []
    for _ in range(count):
        words = rng.choices(["the", "cat", "mat", "sat", "on", "a"], k=6)
        tags = ["O"] * len(words)
        for place, word in enumerate(words):
            if word == "cat":
                tags[place] = "B-ANIMAL"
            elif word == "mat":
                tags[place] = "I-ANIMAL" if place and words[place - 1] == "cat" else "B-THING"
        sentences.append(Sentence(words, tags))
    return sentences


def write_text(folder, splits, *, end=".txt", between=" ", line_end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, sentences in splits.items():
        blocks = [[f"{word}{between}{tag}" for word, tag in zip(*sentence, strict=True)] for sentence in sentences]
        text = (line_end * 2).join(line_end.join(block) for block in blocks)
        (folder / f"{split}{end}").write_text(text + line_end, newline="")


def as_rows(sentences, numbers=True):
    return {
        "tokens": [sentence.words for sentence in sentences],
        "ner_tags": [[TAGS.index(tag) if numbers else tag for tag in sentence.tags] for sentence in sentences],
    }


def with_names():
    words = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string"))})
    words["ner_tags"] = datasets.Sequence(datasets.ClassLabel(names=list(TAGS)))
    return words


def write_parquet(folder):
    folder.mkdir(parents=True)
    path = folder / "train-00000-of-00001.parquet"
    datasets.Dataset.from_dict(as_rows(SENTENCES), features=with_names()).to_parquet(path)


def write_words(folder):
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pa.table(as_rows(SENTENCES, numbers=False)), folder / "train.parquet")


def write_conll(folder):
    write_text(folder, {"eng.train": SENTENCES}, end="", between=" NN I-NP ", line_end="\r\n")
    path = folder / "eng.train"
    path.write_text("-DOCSTART- -X- -X- O\n\n" + path.read_text())


def read(folder, split="train"):
    return read_sentences(folder, split)[0]


FORMS = {
    "CoNLL 2003": write_conll,
    "WNUT": lambda folder: write_text(folder, {"train": SENTENCES}, end=".conll", between="\t"),
    "Hub": write_parquet,
    "parquet with words": write_words,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_sentences(tmp_path, form):
    FORMS[form](tmp_path / "set" / "en")
    assert read(tmp_path / "set" / "en") == SENTENCES
    assert find_data_sets(tmp_path) == ["set/en"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("cat\n", "line 1: 'cat' is one field; a line has a word first, its tag last"),
        ("the O\ncat ANIMAL\n", "train row 0: 'ANIMAL' is no tag"),
        ("\n\n", "train has no rows"),
        ({"tokens": [["a"]], "ner_tags": [[1]]}, "tag 1 has no name, since the file names none"),
        ({"tokens": [["a", "b"]], "ner_tags": [["O"]]}, "row 0 has 2 words, but 1 tags"),
        ({"text": ["a"]}, "has the columns text, but no tokens, ner_tags"),
    ],
)
def test_data_without_words_tags_or_names_is_refused_with_its_place(tmp_path, content, reason):
    (tmp_path / "set").mkdir()
    if isinstance(content, str):
        (tmp_path / "set" / "train.txt").write_text(content)
    else:
        pyarrow.parquet.write_table(pa.table(content), tmp_path / "set" / "train.parquet")
    with pytest.raises(DataError, match=reason):
        read(tmp_path / "set")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ner")
    write_model(folder / "model", "Bert")
    write_text(folder / "data" / "animals", {"train": draw(96, 0), "dev": draw(32, 1), "test": draw(32, 2)})
    write_text(folder / "data" / "untested", {"train": draw(48, 3), "valid": draw(24, 4)})
    return folder


def build(place, *tasks, output="output", **changes):
    values = {
        "model": place / "model",
        "data_dir": place / "data",
        "output": place / output,
        "tasks": tasks,
        "batch_size": (8,),
        "learning_rate": (1e-3,),
        "weight_decay": (1e-5,),
        "epochs": 4,
        "device": "cpu",
    }
    return NerOptions(**{**values, **changes})


def folder_of(options):
    return options.output / options.model.name


def results_of(options):
    tasks = read_record(folder_of(options) / "ner.json")["results"]["tasks"]
    return {name: result | {"seconds": 0.0} for name, result in tasks.items()}


def byte_level():
    """As RoBERTa's and ModernBERT's, which would refuse or spoil words without the space before them."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["[PAD]", "[CLS]"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the cat the cat mat mat"] * 9, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")


def word_pieces(place):
    return load_tokenizer(place / "model")


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        (word_pieces, {"the": 0, "[UNK]": 2, "mat": 3}),  # the second word gives no token
        (lambda _: byte_level(), {"the": 0, "â": 1, "Ġcat": 2, "Ġmat": 3}),
    ],
)
def test_first_token_of_a_word_carries_its_tag_and_a_word_without_a_token_is_outside(place, kind, tokens):
    sentence = Sentence(["the", "\u200b", "catcat", "mat"], ["O", "B-THING", "B-ANIMAL", "I-ANIMAL"])
    tokenizer = kind(place)
    tagged = to_rows([sentence], list(TAGS), tokenizer, 40)
    (row,) = tagged.rows
    firsts = {
        tokenizer.decode([token]): word
        for word, place in enumerate(row["word_tokens"])
        if place >= 0
        for token in [row["input_ids"][place]]
    }
    assert firsts == tokens
    tag_of = {place: TAGS.index(tag) for place, tag in zip(row["word_tokens"], sentence.tags, strict=True)}
    expected_labels = [tag_of.get(place, -100) for place in range(len(row["input_ids"]))]
    assert row["labels"] == expected_labels and -100 in expected_labels
    given = np.array([[max(label, 0) for label in row["labels"]]])
    assert tagged.to_tags(given) == [
        [tag if word in tokens.values() else "O" for word, tag in enumerate(sentence.tags)]
    ]


def test_words_beyond_the_longest_input_count_as_outside_and_are_named(place):
    with pytest.warns(UserWarning, match="2 words are beyond 4 tokens"):
        tagged = to_rows(SENTENCES[:1], list(TAGS), load_tokenizer(place / "model"), 4)
    assert tagged.to_tags(np.full((1, 4), TAGS.index("B-THING"))) == [["B-THING", "B-THING", "O", "O"]]


def test_validation_set_is_looked_at_after_every_epoch(place, tmp_path):
    task = NerTask("animals", ("train", "validation"), ("f1",), ("O", *sorted(TAGS[1:])))
    point = Point(batch_size=8, learning_rate=1e-3, weight_decay=1e-5, seed=0)
    run = Run(task=task, point=point, start=place / "model", folder=tmp_path, options=build(place, "animals"))
    assert PaperTrainer(run).args.eval_strategy == "epoch"


def test_scores_are_seqevals_of_the_weights_that_are_kept(place):
    evaluation = build(place, "animals", "untested", epochs=16)
    evaluate(evaluation, lambda *_: None)
    results = results_of(evaluation)
    weights = Path(results["animals"]["kept"])
    labels = ("O", *sorted(TAGS[1:]))
    task = NerTask("animals", ("train", "validation", "test"), ("f1",), labels)
    model, tokenizer = task.load(weights, LoadOptions()), load_tokenizer(weights)
    for split, prefix in (("test", "test_"), ("validation", "")):
        rows = to_rows(read(place / "data" / "animals", split), labels, tokenizer, 40)
        with torch.no_grad():
            found = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax(-1) for row in rows.rows]
        expected = f1_score([sentence.tags for sentence in rows.sentences], rows.to_tags(found))
        assert results["animals"]["metrics"][f"{prefix}f1"]["mean"] == expected > 0.5
    assert "test_f1" not in results["untested"]["metrics"]
    assert "| animals |" in (folder_of(evaluation) / "ner.md").read_text()
