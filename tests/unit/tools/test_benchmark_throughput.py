"""The commands for speed and for the report, as users call them. Nothing is timed."""

import json

import pytest
from commands import call
from unit.evaluation.pseudo_perplexity_models import LONGEST, write_model

SIZES = ("--lengths", 16, LONGEST + 8, "--steps", 2, "--warmup", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("encoders")
    return [write_model(place / "bert", "Bert"), write_model(place / "neobert", "neobert")]


def test_models_are_measured_at_every_length_they_take_and_the_report_shows_them(folders, tmp_path):
    output = tmp_path / "results"
    asked = ("--model", *folders, "--output", output, *SIZES)
    _, said, _ = call("evaluate throughput", *asked, "--batch-sizes", 1, 2)
    assert f"bert, {LONGEST + 8}: the model has learned positions for {LONGEST} tokens only" in said
    models = ("bert", "neobert")
    rows = [
        row for name in models for row in json.loads((output / name / "throughput.json").read_text())["results"]["rows"]
    ]
    measured = {(row["model"], row["length"]) for row in rows}
    assert measured == {("bert", 16), ("neobert", 16), ("neobert", LONGEST + 8)}
    assert (output / "throughput.png").read_bytes()[:4] == b"\x89PNG"
    call("report", "--results", output, "--output", tmp_path / "report")
    page = (tmp_path / "report" / "report.md").read_text()
    fastest = max(row["measured"]["tokens_per_second"][1] for row in rows if row["model"] == "bert")
    assert f"| {fastest:,.0f} (" in page


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "bert", "bert"), "two folders are called bert"),
        (("--model", "bert", "--lengths", 41), "learned positions for 40 tokens only"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(folders, tmp_path, monkeypatch, flags, reason):
    monkeypatch.chdir(folders[0].parent)
    code, _, errors = call("evaluate throughput", "--output", tmp_path / "results", "--batch-sizes", 1, *flags)
    assert code == 2 and reason in errors
    assert not (tmp_path / "results").exists()
