"""The probe of validations: what it measures, in every layout, and that training does not notice it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import quick_only, read_metrics, train_on_ranks
from sklearn.neighbors import NearestNeighbors
from unit.tools.commands import call

from megatron_neobert.checkpoint.contents import StoredTensors
from megatron_neobert.evaluation.encoders import load_sentence_transformer
from megatron_neobert.training import loop

LABELS = ("a few", 1, 2)
EVALUATED = {"train_iters": 4, "eval_interval": 2}
LAYOUTS = {
    "two replicas": {},
    "two tensor- and sequence-parallel ranks": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "two stages": {"pipeline_model_parallel_size": 2},
    "two stages, interleaved": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "two context-parallel ranks": {"context_parallel_size": 2},
}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    """90 texts, of which each label has its own favourite letters: 12 rows, so that 6 micro-batches hold them.

    One is longer than a row, and one stands there twice.
    """
    rng = random.Random(0)
    records = []
    for number in range(90):
        label = number % 3
        weights = [2 if place % 3 == label else 1 for place in range(10)]
        words = ["".join(rng.choices("abcdefghij", weights, k=rng.randint(2, 5))) for _ in range(rng.randint(1, 12))]
        records.append({"text": " ".join(words * (20 if number == 7 else 1)), "label": LABELS[label]})
    path = tmp_path_factory.mktemp("labelled") / "texts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, records[0]]), encoding="utf-8")
    return path


def curve(run) -> dict[int, float]:
    return read_metrics(run.checkpoint.save, "probe_accuracy")


def final_weights(run) -> dict[str, torch.Tensor]:
    stored = StoredTensors(Path(run.checkpoint.save) / "iter_0000004")
    return {name: stored.read_whole(name) for name in stored.shapes}


def test_a_probe_changes_no_bit_of_training_and_draws_no_random_number(settings, labelled):
    def check_and_probe(run):
        before = torch.get_rng_state()
        accuracy = probe(run)
        assert torch.equal(torch.get_rng_state(), before)
        return accuracy

    def spoil_and_probe(run):
        next(run.models[0].parameters()).data.mul_(1 + 2**-20)
        return probe(run)

    def train(name, probe_with, **data):
        run = settings(name, training=EVALUATED, data=data)
        train_on_ranks(run, prepare=lambda: setattr(loop, "probe_accuracy", probe_with))
        return run, read_metrics(run.checkpoint.save), read_metrics(run.checkpoint.save, "validation_loss")

    probe = loop.probe_accuracy
    path = str(labelled)
    without, losses, validations = train("without", check_and_probe)
    probed, *same = train("probed", check_and_probe, probe_data_path=path)
    assert list(curve(probed)) == list(validations) == [2, 4] and not curve(without)
    assert same == [losses, validations]
    expected, found = final_weights(without), final_weights(probed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    _, *other = train("spoiled", spoil_and_probe, probe_data_path=path)
    assert other != [losses, validations], "a probe that touches the weights must show"


def test_probe_accuracy_is_that_of_the_exported_models_embeddings(settings, labelled, tmp_path):
    """Computed by sentence-transformers, a padded batch at a time, and scikit-learn."""
    run = settings(training=EVALUATED, data={"probe_data_path": str(labelled)})
    train_on_ranks(run)
    assert call("convert", "megatron-to-hf", "--load", run.checkpoint.save, "--output", tmp_path / "model")[0] == 0
    model = load_sentence_transformer(tmp_path / "model", max_length=run.data.seq_length)
    records = [json.loads(line) for line in labelled.read_text().splitlines()][:-1]
    labels = np.array([str(record["label"]) for record in records])

    def accuracy(embeddings):
        # Without queries, a point is not its own neighbour.
        nearest = NearestNeighbors(n_neighbors=1, metric="cosine").fit(embeddings).kneighbors(return_distance=False)
        return (labels[nearest[:, 0]] == labels).mean()

    texts = [record["text"] for record in records]
    assert curve(run)[4] == pytest.approx(accuracy(model.encode(texts)), abs=1e-12)
    states = model.encode(texts, output_value="token_embeddings", convert_to_numpy=False)
    first_tokens = torch.stack([own[0] for own in states]).numpy()
    assert curve(run)[4] != pytest.approx(accuracy(first_tokens), abs=1e-12), "another pooling must show"


@pytest.mark.parametrize("layout", quick_only(LAYOUTS, *list(LAYOUTS)[:2]))
def test_probe_accuracy_is_the_same_in_every_layout(settings, labelled, layout):
    """Of weights that are equal to rounding (measured: the same accuracy), of replicas to the bit."""
    sections = {"training": EVALUATED, "data": {"probe_data_path": str(labelled)}, "model": {"num_layers": 4}}
    alone = settings("alone", **sections)
    several = settings("several", **sections, parallel=LAYOUTS[layout])
    train_on_ranks(alone)
    train_on_ranks(several, world_size=2)
    assert curve(several) == curve(alone)
    assert all(1 / 3 < accuracy < 1 for accuracy in curve(alone).values()), "neither chance nor all of them"
