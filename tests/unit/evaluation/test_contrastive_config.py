"""The YAML file of contrastive fine-tuning, and the recipe."""

from pathlib import Path

import pytest

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.embed_data import read_config

RECIPE = Path(__file__).resolve().parents[3] / "megatron_neobert" / "configs" / "evaluation" / "contrastive.yaml"
# Of the released code, which has no divisors for the datasets that only the paper names.
DIVISORS = {"ALLNLI": 2, "AMAZONQA": 2, "CONCURRENTQA": 21, "FEVER": 2, "GITHUBISSUE": 2, "GOOAQ": 7, "MSMARCO": 2}
DIVISORS |= {"PAQ": 2, "PUBMEDQA": 22, "QQP": 50, "SENTENCECOMP": 2, "STACKEXCHANGE": 2, "STACKOVERFLOW": 50}
DIVISORS |= {"STS12": 2, "STSBENCHMARK": 2, "TRIVIAQA": 3, "WIKIHOW": 2}


def test_recipe_has_the_papers_settings_and_datasets():
    config = read_config(RECIPE)
    training = config.training
    assert (training.steps, training.alpha, training.temperature) == (2000, 0.5, 0.07)
    assert {key: config.datasets[key].divisor for key in DIVISORS} == DIVISORS
    paper_only = {"AGNEWS", "MEDMCQA", "MEDMCQACLUST", "NPR", "YAHOOCLUST"}
    assert set(config.datasets) == DIVISORS.keys() | paper_only
    assert {key for key, source in config.datasets.items() if not source.default} == {"MEDMCQACLUST", "YAHOOCLUST"}
    assert all(source.hub for source in config.datasets.values() if source.default)
    assert len({source.instruction for source in config.datasets.values()}) == 22 - 2, "two pairs share an instruction"


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_unknown_or_invalid_setting_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "run.yaml")


def test_number_that_yaml_reads_as_a_string_is_accepted(tmp_path):
    (tmp_path / "run.yaml").write_text("{training: {learning_rate: 1e-3}, datasets: {A: {divisor: 1, instruction: a}}}")
    assert read_config(tmp_path / "run.yaml").training.learning_rate == 1e-3
