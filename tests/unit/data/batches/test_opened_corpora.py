"""Opened corpora of a run: one that is split, one for validation, blends, drop lists, and their hashes."""

import numpy as np
import pytest
from unit.data.preprocess_workspace import Workspace
from unit.data.small_corpus import write_attributes, write_corpus

from megatron_neobert.config.data_path import curve_names
from megatron_neobert.config.schema import DataConfig
from megatron_neobert.data.batches.corpora import open_corpora
from megatron_neobert.data.corpus.drop_list import write_drop_list
from megatron_neobert.errors import DataError, MissingInputError


@pytest.fixture
def place(tmp_path):
    """Two corpora of one tokenizer: `run` for training and `held_out` for validation."""
    place = Workspace(tmp_path)
    for name, counts in (("run", range(1, 161)), ("held_out", range(85, 125))):
        place.add_texts(f"{name}.jsonl", *("hello " * count for count in counts))
        place.run(name, inputs=(str(place.inputs / f"{name}.jsonl"),))
    return place


def prefix(place, name="run"):
    return str(place.folder / "out" / f"{name}_content_document")


def opened(place, *data_path, **changes):
    paths = {"data_path": data_path or (prefix(place),), "tokenizer_model": str(place.vocab)}
    return open_corpora(DataConfig(**paths, **changes))


def numbers(source):
    return source.documents.numbers(np.arange(len(source.documents))).tolist()


def test_with_corpora_for_validation_each_has_a_curve_and_all_other_documents_are_for_training(place):
    held_out = place.corpus("held_out")
    inputs = opened(place, valid_data_path=(str(held_out.prefix), f"{held_out.prefix}:min=100"), split="3,1")
    (training,), (validation,) = inputs.training, inputs.validation["held_out_content_document"]
    assert numbers(training) == list(range(160))
    assert validation.corpus.manifest == held_out.manifest != training.corpus.manifest
    assert list(inputs.validation) == [f"held_out_content_document{end}" for end in ("", "_min_100")]
    lengths = held_out.lengths_of(np.arange(40))
    assert [len(source.documents) for (source,) in inputs.validation.values()] == [40, sum(lengths >= 100)]
    assert curve_names(("a/web", "b/web")) == ["web_1", "web_2"]


def test_a_corpus_of_another_tokenizer_is_refused(place):
    write_corpus(place.folder / "other", [[7]])
    other = str(place.folder / "other")
    with pytest.raises(DataError, match="was written with tokenizer"):
        opened(place, valid_data_path=(other,))
    with pytest.raises(DataError, match="was written with tokenizer"):
        opened(place, "1", prefix(place), "1", other)


def test_a_blend_splits_every_component_alike_and_then_chooses_by_length(place):
    """As in the paper's second stage: a corpus, and its longer documents in two further components."""
    path = prefix(place)
    inputs = opened(place, "0.2", path, "0.4", f"{path}:min=100", "0.4", f"{path}:min=130:max=180", split="3,1")
    corpus = inputs.training[0].corpus
    lengths = corpus.lengths_of(np.arange(len(corpus)))
    held_out = range(2, len(corpus), 4)
    limits = ((1, 10_000), (100, 10_000), (130, 180))
    for sources, documents in (
        (inputs.training, [number for number in range(len(corpus)) if number not in held_out]),
        (inputs.validation["split"], held_out),
    ):
        assert [source.weight for source in sources] == [1, 2, 2]
        assert all(source.corpus is corpus for source in sources)
        for source, (least, most) in zip(sources, limits, strict=True):
            assert numbers(source) == [n for n in documents if least <= lengths[n] <= most]
    assert len(inputs.description) == 3
    assert f"{path}:min=100: {len(inputs.training[1].documents)} of {len(corpus)} docu" in (inputs.description[1])


def drop(place, *numbers, name="list"):
    """Write a drop list of the corpus `run`, and return the entry of --data-path that uses it."""
    corpus = place.corpus()
    mask = np.isin(np.arange(len(corpus)), numbers)
    write_drop_list(place.folder / name, [corpus], mask, {}, folder=place.folder)
    return f"{prefix(place)}:drop={place.folder / name}"


def test_the_identity_of_the_data_depends_on_documents_and_weights_but_not_on_paths_and_words(place):
    corpus, path = place.corpus(), prefix(place)
    place.run("copy", inputs=(str(place.inputs / "run.jsonl"),))
    write_attributes(corpus.prefix, {"score": [number % 7 for number in range(len(corpus))]})
    alike = [
        ([path], [prefix(place, "copy")]),
        (["0.2", path, "0.8", f"{path}:min=50"], ["1", prefix(place, "copy"), "4", f"{path}:min=50"]),
        ([f"{path}:where=score>=3"], [f"{path}:where=not score<3"]),
        ([drop(place, 1, 2)], [drop(place, 1, 2, name="moved")]),
    ]
    others = [
        ["0.3", path, "0.7", f"{path}:min=50"],
        ["0.2", path, "0.8", f"{path}:min=51"],
        ["0.2", path, "0.8", f"{path}:min=50:max=150"],
        ["0.8", f"{path}:min=50", "0.2", path],
        ["0.2", prefix(place, "held_out"), "0.8", f"{path}:min=50"],
        [f"{path}:min=50"],
        [f"{path}:where=score>=4"],
        [drop(place, name="none")],
        [drop(place, 1, 3, name="others")],
    ]

    def identity(data_path):
        return opened(place, *data_path, split="1").sha256

    assert all(identity(first) == identity(second) for first, second in alike)
    assert len({*map(identity, [*(first for first, _ in alike), *others])}) == 4 + 9


def test_drop_lists_that_are_missing_drop_everything_or_belong_to_another_corpus_are_refused(place):
    everything = drop(place, *range(len(place.corpus())))
    count = len(place.corpus())
    with pytest.raises(DataError, match=rf"drop=.*/list: none of the {count:,} documents for training is chosen"):
        opened(place, everything, split="1")
    other = place.corpus("held_out").prefix
    with pytest.raises(
        DataError, match=r"drop list .*list is for .*/run_content_document \(.* but .*held_out_content_document is"
    ):
        opened(place, f"{other}:drop={place.folder / 'list'}", split="1")
    with pytest.raises(MissingInputError, match="drop list nowhere: no such file"):
        opened(place, f"{other}:drop=nowhere", split="1")
