"""The command that measures pseudo-perplexity, as a user starts it: once, again, and refused."""

import json

import pytest
from commands import call
from unit.evaluation.pseudo_perplexity_models import make_texts, write_model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models, and texts to measure them on."""
    folder = tmp_path_factory.mktemp("place")
    write_model(folder / "bert", "Bert")
    write_model(folder / "ours", "neobert")
    lines = (json.dumps({"text": text}) + "\n" for text in make_texts(20, longest=38))
    (folder / "texts.jsonl").write_text("".join(lines))
    (folder / "no model").mkdir()
    (folder / "no model" / "config.json").write_text("{}")
    return folder


def evaluate(place, output, *models, flags=()):
    folders = [place / name for name in models]
    data = ("--data", place / "texts.jsonl", "--text-key", "text")
    words = ("--model", *folders, *data, "--output", output, "--batch-tokens", 512, *flags)
    return call("evaluate ppl", *words)


def test_models_are_measured_one_after_the_other_and_not_again(place, tmp_path):
    code, output, errors = evaluate(place, tmp_path / "out", "bert", "ours")
    assert code == 0, errors
    assert evaluate(place, tmp_path / "out", "bert", "ours")[1] == output
    assert [line.split(":")[0] for line in output.splitlines()[:2]] == ["bert", "ours"]
    page = (tmp_path / "out" / "pseudo_perplexity.md").read_text()
    assert "| bert |" in page and "| ours |" in page


@pytest.mark.parametrize(
    ("models", "flags", "code", "problem"),
    [
        (["bert"], ("--positions-per-doc", 0), 2, "--positions-per-doc 0 is below 1"),
        (["bert", "bert"], (), 2, "two folders are called bert"),
        (["bert"], ("--data", "none.parquet"), 66, "none.parquet: no file matches"),
        (["no model"], (), 66, "no model holds no tokenizer"),
        (["no model"], ("--text-key", "body"), 65, "has no text (20 x missing key); check --text-key body"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(place, tmp_path, models, flags, code, problem):
    ended, _, errors = evaluate(place, tmp_path, *models, flags=flags)
    assert ended == code and problem in errors
