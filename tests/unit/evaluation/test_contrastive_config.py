"""The YAML file of contrastive fine-tuning, the shipped one included."""

from pathlib import Path

import pytest
from unit.evaluation.contrastive_place import write_yaml

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.embed_data import DatasetSource, read_config

SHIPPED = Path(__file__).resolve().parents[3] / "megatron_neobert" / "configs" / "evaluation" / "contrastive.yaml"
# Of the released code; what the paper adds has no divisor there.
DIVISORS = {"ALLNLI": 2, "AMAZONQA": 2, "CONCURRENTQA": 21, "FEVER": 2, "GITHUBISSUE": 2, "GOOAQ": 7, "MSMARCO": 2}
DIVISORS |= {"PAQ": 2, "PUBMEDQA": 22, "QQP": 50, "SENTENCECOMP": 2, "STACKEXCHANGE": 2, "STACKOVERFLOW": 50}
DIVISORS |= {"STS12": 2, "STSBENCHMARK": 2, "TRIVIAQA": 3, "WIKIHOW": 2}


def test_shipped_file_is_the_papers_recipe():
    config = read_config(SHIPPED)
    training = config.training
    assert (training.steps, training.alpha, training.temperature) == (2000, 0.5, 0.07)
    assert {key: config.datasets[key].divisor for key in DIVISORS} == DIVISORS
    added = {"AGNEWS", "MEDMCQA", "MEDMCQACLUST", "NPR", "YAHOOCLUST"}
    assert set(config.datasets) == DIVISORS.keys() | added
    assert {key for key, source in config.datasets.items() if not source.default} == {"MEDMCQACLUST", "YAHOOCLUST"}
    assert all(source.hub for source in config.datasets.values() if source.default)
    assert len({source.instruction for source in config.datasets.values()}) == 22 - 2  # two pairs share theirs


@pytest.mark.parametrize(("target", "pairs"), [(128, 64), (32, 16), (3, 2)])
def test_batch_is_divided_but_keeps_two_pairs(target, pairs):
    assert DatasetSource(divisor=2, instruction="").batch_size(target) == pairs
    assert DatasetSource(divisor=50, instruction="").batch_size(32) == 2


def test_all_problems_are_said_at_once(tmp_path):
    path = write_yaml(tmp_path / "run.yaml", temprature=0.1, alpha=-1, warmup_ratio=2, instructions="corpus")
    text = path.read_text(encoding="utf-8").replace("divisor: 4", "divisor: 0")
    path.write_text(text.replace("learning_rate: 0.003", "learning_rate: 1e-3"), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_config(path)
    said = "\n".join(error.value.problems)
    assert "unknown setting temprature; did you mean 'temperature'?" in said
    assert "training.instructions corpus is not one of query, both, none" in said
    assert "training.alpha -1.0 is below 0" in said
    assert "learning_rate" not in said, "1e-3 is a number, though YAML 1.1 reads it as a text"
    assert "datasets.HARD.divisor 0 is below 1, its smallest legal value." in said


@pytest.mark.parametrize("text", ["", "training: {}", "a: [", "training: {}\ndatasets: []", "\x00"])
def test_file_that_is_something_else_is_refused(text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        read_config(path)
