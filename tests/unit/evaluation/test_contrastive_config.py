"""The YAML file of contrastive fine-tuning, the shipped one included."""

from pathlib import Path

import pytest
from unit.evaluation.contrastive_place import write_yaml

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.embed_data import read_config

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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training: {temprature: 0.1}", "unknown field `temprature`.*training"),
        ("training: {alpha: -1}", "training.alpha"),
        ("training: {warmup_ratio: 2}", "training.warmup_ratio"),
        ("training: {instructions: corpus}", "'corpus'.*training.instructions"),
        ("datasets: {KEY: {divisor: 0, instruction: a}}", "divisor"),
        ("datasets: {KEY: {divisor: 1, instruction: a, hub: b, query: c}}", "hub b without query and positive"),
        (
            "datasets: {KEY: {divisor: 1, instruction: a, hub: b, retrieval: true, query: c}}",
            "retrieval: true has fixed columns",
        ),
        ("datasets: {KEY: {divisor: 1}}", "missing required field `instruction`"),
        *((text, r"run\.yaml") for text in ("", "training: {}", "a: [", "training: {}\ndatasets: {}", "\x00")),
    ],
)
def test_setting_or_dataset_that_is_unknown_or_impossible_is_refused_with_its_place(tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(tmp_path / "run.yaml")


def test_number_that_yaml_reads_as_a_text_is_a_number(tmp_path):
    path = write_yaml(tmp_path / "run.yaml")
    path.write_text(path.read_text().replace("learning_rate: 0.003", "learning_rate: 1e-3"))
    assert read_config(path).training.learning_rate == 1e-3
