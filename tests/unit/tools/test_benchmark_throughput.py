"""The commands for speed and for the report, as users call them. Nothing is timed."""

import json
import re

import pytest
from commands import call
from unit.evaluation.pseudo_perplexity_models import LONGEST, write_model

from megatron_neobert.huggingface.modeling_neobert import NeoBERT

SIZES = ("--lengths", 16, LONGEST + 8, "--steps", 2, "--warmup", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("encoders")
    return [write_model(place / "bert", "Bert"), write_model(place / "neobert", "neobert")]


def test_models_are_measured_in_every_layout_they_take_and_the_report_shows_them(folders, tmp_path):
    output = tmp_path / "results"
    asked = ("--model", *folders, "--output", output, *SIZES, "--layout", "both", "--backward")
    _, said, _ = call("evaluate throughput", *asked, "--batch-sizes", 1, 2)
    assert f"bert, {LONGEST + 8}: the model has learned positions for {LONGEST} tokens only" in said
    assert "bert, packed: its forward takes no cu_seqlens" in said
    models = ("bert", "neobert")
    rows = [
        row for name in models for row in json.loads((output / name / "throughput.json").read_text())["results"]["rows"]
    ]
    passes = {"forward", "forward+backward"}
    assert {(row["model"], row["layout"], row["passes"], row["length"]) for row in rows} == {
        *(("bert", "padded", kind, 16) for kind in passes),
        *(("neobert", lay, kind, n) for lay in ("padded", "packed") for kind in passes for n in (16, LONGEST + 8)),
    }
    assert all(row["measured"]["tokens"] == row["length"] * row["batch_size"] for row in rows)
    for kind in ("forward", "forward_backward"):
        assert (output / f"throughput_{kind}.png").read_bytes()[:4] == b"\x89PNG"
    _, said, _ = call("report", "--results", output, "--output", tmp_path / "report")
    assert "neobert: no record of pseudo_perplexity, glue, ner, mteb, contrastive" in said
    page = (tmp_path / "report" / "report.md").read_text()
    asked_for = [row["measured"] for row in rows if (row["model"], row["passes"]) == ("bert", "forward")]
    fastest = max(measured["tokens_per_second"][1] for measured in asked_for)
    assert f"| {fastest:,.0f} (" in page


def test_a_model_without_a_head_is_measured_forward_and_refused_backward(folders, tmp_path):
    folder = tmp_path / "headless"
    write_model(folder, "neobert")
    NeoBERT.from_pretrained(folders[1]).save_pretrained(folder)
    asked = ("--model", folder, "--output", tmp_path / "results", *SIZES, "--batch-sizes", 1)
    _, _, errors = call("evaluate throughput", *asked, "--backward")
    assert re.search(r"decoder\.\w+ is not there.*AutoModelForMaskedLM would have random weights", errors)
    assert not (tmp_path / "results").exists()
    assert call("evaluate throughput", *asked)[0] == 0
    assert (tmp_path / "results" / "headless" / "throughput.json").exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model", "bert", "bert"), "two folders are called bert"),
        (("--model", "neobert", "--max-tokens", 100), "--lengths 8192 is over --max-tokens 100"),
        (
            ("--model", "bert", "--lengths", 8, "--layout", "packed"),
            "nothing can be measured (packed: its",
        ),
        (("--model", "bert", "--lengths", 41), "learned positions for 40 tokens only"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(folders, tmp_path, monkeypatch, flags, reason):
    monkeypatch.chdir(folders[0].parent)
    code, _, errors = call("evaluate throughput", "--output", tmp_path / "results", "--batch-sizes", 1, *flags)
    assert code == 2 and reason in errors
    assert not (tmp_path / "results").exists()
