"""The command that measures pseudo-perplexity, as a user starts it: killed, started again, and refused."""

import json
import subprocess
import sys
import time

import pytest
from commands import ENVIRONMENT, command_line, import_tool
from unit.evaluation.pseudo_perplexity_models import make_texts, write_model

from megatron_neobert.errors import ConfigError, MissingInputError

TOOL = "evaluate_pseudo_perplexity"
DOCUMENTS = 200


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models, and texts to measure them on."""
    folder = tmp_path_factory.mktemp("place")
    write_model(folder / "bert", "Bert")
    write_model(folder / "ours", "neobert")
    lines = (json.dumps({"text": text}) + "\n" for text in make_texts(DOCUMENTS, longest=38))
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


def positions_of(path):
    return sorted((line["id"], line["positions"]) for line in map(json.loads, path.read_text().splitlines()))


def kill_after_some_documents(command, output):
    """How many documents were written when the process was killed."""
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (begun := list(output.glob("bert/*.jsonl"))) or begun[0].stat().st_size < 2000:
        assert process.poll() is None, "it has ended before it could be killed"
        assert time.monotonic() < deadline, "nothing was written in ten minutes"
        time.sleep(0.01)
    process.kill()
    process.wait()
    return begun[0].read_bytes().count(b"\n")


@pytest.mark.slow
def test_killed_command_goes_on_and_gives_the_table_of_one_that_was_not(place, tmp_path, run_here, capsys):
    killed, whole = (words_of(place, tmp_path / name, "bert", "ours") for name in ("killed", "whole"))
    assert 0 < kill_after_some_documents(command_line(*killed), tmp_path / "killed") < DOCUMENTS

    run_here(*killed)
    said = capsys.readouterr().out.splitlines()
    run_here(*whole)
    assert said[:2] == capsys.readouterr().out.splitlines()[:2]
    assert [line.split(":")[0] for line in said[:2]] == ["bert", "ours"]
    tables = [(tmp_path / name / "pseudo_perplexity.csv").read_text().splitlines()[1:] for name in ("killed", "whole")]
    assert len(tables[0]) == len(tables[1]) == 2  # one bin has all these documents
    for line, expected in zip(*tables, strict=True):
        numbers = [float(value) for value in line.split(",")[1:]]
        assert numbers == pytest.approx([float(value) for value in expected.split(",")[1:]], rel=1e-5)
    for path in tmp_path.glob("killed/*/*.jsonl"):
        assert positions_of(path) == positions_of(tmp_path / "whole" / path.relative_to(tmp_path / "killed"))


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
