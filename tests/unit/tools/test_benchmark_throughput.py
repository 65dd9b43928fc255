"""`neobert evaluate throughput` and `neobert report` as a user calls them. Nothing is timed."""

import json

import pytest
from commands import call
from unit.evaluation.pseudo_perplexity_models import LONGEST, write_model

SIZES = ("--lengths", 16, LONGEST + 8, "--batch-sizes", 1, 2, "--steps", 2, "--warmup", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("encoders")
    return [write_model(parent / "bert", "Bert"), write_model(parent / "neobert", "neobert")]


def test_models_are_measured_at_every_length_they_support_and_shown_in_the_report(folders, tmp_path):
    output = tmp_path / "results"
    _, printed, _ = call("evaluate throughput", "--model", *folders, "--output", output, *SIZES)
    assert f"not measured: bert, {LONGEST + 8} tokens; at most {LONGEST} learned positions" in printed
    records = [json.loads((output / name / "throughput.json").read_text()) for name in ("bert", "neobert")]
    rows = [row for record in records for row in record["results"]["rows"]]
    lengths = {(row["model"], row["length"]) for row in rows}
    assert lengths == {("bert", 16), ("neobert", 16), ("neobert", LONGEST + 8)}
    assert (output / "throughput.png").read_bytes()[:4] == b"\x89PNG"
    call("report", "--results", output, "--output", tmp_path / "report")
    fastest = max(row["measured"]["tokens_per_second"][1] for row in rows if row["model"] == "bert")
    assert f"| {fastest:,.0f} (" in (tmp_path / "report" / "report.md").read_text()


def test_model_that_supports_none_of_the_lengths_is_refused_before_anything_is_written(folders, tmp_path):
    flags = ("--model", folders[0], "--output", tmp_path / "results", "--lengths", LONGEST + 1)
    code, _, errors = call("evaluate throughput", *flags)
    assert code == 2 and f"at most {LONGEST} learned positions" in errors
    assert not (tmp_path / "results").exists()
