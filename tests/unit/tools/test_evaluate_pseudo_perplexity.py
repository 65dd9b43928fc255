"""`neobert evaluate ppl` as a user calls it: a first time, a second time, and refused."""

import json

import pytest
from commands import call
from unit.evaluation.pseudo_perplexity_models import make_texts, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with two models, a folder that has only a config, and texts."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "bert", "Bert")
    write_model(folder / "ours", "neobert")
    lines = (json.dumps({"text": text}) + "\n" for text in make_texts(20, longest=38))
    (folder / "texts.jsonl").write_text("".join(lines))
    (folder / "no model").mkdir()
    (folder / "no model" / "config.json").write_text("{}")
    return folder


def evaluate(folder, output, *models, flags=()):
    paths = [folder / name for name in models]
    data = ("--data", folder / "texts.jsonl", "--text-key", "text")
    return call("evaluate ppl", "--model", *paths, *data, "--output", output, "--batch-tokens", 512, *flags)


def test_models_are_measured_one_after_the_other_and_a_second_start_prints_the_same(folder, tmp_path):
    code, output, errors = evaluate(folder, tmp_path / "out", "bert", "ours")
    assert code == 0, errors
    assert evaluate(folder, tmp_path / "out", "bert", "ours")[1] == output
    assert [line.split(":")[0] for line in output.splitlines()[:2]] == ["bert", "ours"]
    page = (tmp_path / "out" / "pseudo_perplexity.md").read_text()
    assert "| bert |" in page and "| ours |" in page


@pytest.mark.parametrize(
    ("models", "flags", "code", "problem"),
    [
        (["bert", "bert"], (), 2, "two models would be named bert"),
        (["no model"], (), 66, "no model has no tokenizer"),
        (
            ["bert"],
            ("--text-key", "body"),
            65,
            "has no document to measure (20 x missing key); check --text-key body",
        ),
    ],
)
def test_models_and_data_that_cannot_be_measured_are_refused(folder, tmp_path, models, flags, code, problem):
    ended, _, errors = evaluate(folder, tmp_path, *models, flags=flags)
    assert ended == code and problem in errors
