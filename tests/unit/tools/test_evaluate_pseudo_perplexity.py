"""The command that measures pseudo-perplexity, as a user starts it: once, again, and refused."""

import json
import sys

import pytest
from commands import import_tool
from unit.evaluation.pseudo_perplexity_models import make_texts, write_model

from megatron_neobert.errors import ConfigError, MissingInputError

TOOL = "evaluate_pseudo_perplexity"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models, and texts to measure them on."""
    folder = tmp_path_factory.mktemp("place")
    write_model(folder / "bert", "Bert")
    write_model(folder / "ours", "neobert")
    lines = (json.dumps({"text": text}) + "\n" for text in make_texts(20, longest=38))
    (folder / "texts.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def run_here(place, monkeypatch):
    """Runs the command in this process, which spares the seconds that torch takes to be imported."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        import_tool(TOOL).main()

    return call


def words_of(place, output, *models):
    folders = [place / name for name in models]
    data = ("--data", place / "texts.jsonl", "--text-key", "text")
    return (TOOL, "--model", *folders, *data, "--output", output, "--batch-tokens", 512)


def test_models_are_measured_one_after_the_other_and_not_again(place, tmp_path, run_here, capsys):
    words = words_of(place, tmp_path / "out", "bert", "ours")
    run_here(*words)
    first = capsys.readouterr()
    run_here(*words)
    assert capsys.readouterr().out == first.out
    assert [line.split(":")[0] for line in first.out.splitlines()[:2]] == ["bert", "ours"]
    lines = (tmp_path / "out" / "pseudo_perplexity.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["model", "bert", "ours"]  # one bin has all these documents


@pytest.mark.parametrize(
    ("models", "flags", "problem"),
    [
        (["bert"], ("--positions-per-doc", 0), "argument --positions-per-doc: 0 is not a whole number"),
        (["bert"], ("--length-bins", 64, 64), "--length-bins 64 64 must increase"),
        (["bert", "bert"], (), "two folders are called bert"),
    ],
)
def test_settings_that_cannot_be_are_refused(place, tmp_path, run_here, models, flags, problem):
    with pytest.raises(ConfigError, match=problem):
        run_here(*words_of(place, tmp_path, *models), *flags)


def test_data_that_is_not_there_is_named(place, tmp_path, run_here):
    with pytest.raises(MissingInputError, match=r"none\.parquet: no file matches"):
        run_here(*words_of(place, tmp_path, "bert"), "--data", tmp_path / "none.parquet")
