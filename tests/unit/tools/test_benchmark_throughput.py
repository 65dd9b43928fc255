"""The commands for speed and for the report, as users call them. Nothing is timed."""

import json
import re

import pytest
from commands import call
from unit.evaluation.throughput_subjects import POSITIONS, save_folders

from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.throughput_tables import best_rows
from megatron_neobert.huggingface.modeling_neobert import NeoBERT

SIZES = ("--lengths", POSITIONS, 40, "--steps", 2, "--warmup", 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_folders(tmp_path_factory.mktemp("encoders"))


def test_models_are_measured_in_every_layout_they_take_and_the_report_shows_them(folders, tmp_path):
    output = tmp_path / "results"
    asked = ("--model", *folders, "--output", output, *SIZES, "--layout", "both", "--backward")
    _, said, _ = call("evaluate throughput", *asked, "--batch-sizes", 1, 2)
    assert f"bert, 40: has learned positions for {POSITIONS} tokens only" in said
    assert "bert, float32, sdpa, packed: its forward takes no cu_seqlens" in said

    models = ("bert", "neobert")
    records = {name: json.loads((output / name / "throughput.json").read_text()) for name in models}
    lines = [row for record in records.values() for row in record["results"]["rows"]]
    passes = {"forward", "forward+backward"}
    assert {(line["model"], line["layout"], line["passes"], line["length"]) for line in lines} == {
        *(("bert", "padded", kind, POSITIONS) for kind in passes),
        *(("neobert", layout, kind, n) for layout in ("padded", "packed") for kind in passes for n in (POSITIONS, 40)),
    }
    assert len(lines) == 2 * (2 + 2 * 2 * 2)  # batch sizes x (bert, and neobert: layouts x passes x lengths)
    assert {line["outcome"] for line in lines} == {"measured"} and {line["steps"] for line in lines} == {2}
    assert all(line["tokens"] == line["length"] * line["batch_size"] for line in lines)

    record = records["neobert"]
    assert record["model"]["fingerprint"] == fingerprint(folders[1])
    assert record["results"]["parameters"] > 0 and len(record["results"]["rows"]) == 16
    assert record["settings"]["seed"] == 0 and record["settings"]["steps"] == 2
    for kind in ("forward", "forward_backward"):
        assert (output / f"throughput_{kind}.png").read_bytes()[:4] == b"\x89PNG"

    ledger = output / "throughput" / "ledger.jsonl"
    steps = ledger.read_text()
    call("evaluate throughput", *asked, "--batch-sizes", 1, 2, 3)  # one more: the others stay as they are
    added = ledger.read_text().removeprefix(steps)
    assert [json.loads(line)["unit"]["batch_size"] for line in added.splitlines()] == [3, 3]

    _, said, _ = call("report", "--results", output, "--output", tmp_path / "report")
    assert "neobert: no record of pseudo_perplexity, glue, ner, mteb, contrastive" in said
    page = (tmp_path / "report" / "report.md").read_text()
    records = [json.loads((output / name / "throughput.json").read_text()) for name in models]
    best = best_rows([row for record in records for row in record["results"]["rows"]])
    assert len(best) == 10
    assert all(f"| {row['tokens_per_second']:,.0f} (" in page for row in best)


def test_a_model_without_a_head_is_measured_forward_and_refused_backward(tmp_path):
    folder = tmp_path / "headless"
    save_folders(tmp_path)
    NeoBERT.from_pretrained(tmp_path / "neobert").save_pretrained(folder)
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
            "nothing can be measured (bert, float32, sdpa, packed",
        ),
        (("--model", "bert", "--lengths", 17), "learned positions for 16 tokens only"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(folders, tmp_path, monkeypatch, flags, reason):
    monkeypatch.chdir(folders[0].parent)
    code, _, errors = call("evaluate throughput", "--output", tmp_path / "results", "--batch-sizes", 1, *flags)
    assert code == 2 and reason in errors
    assert not (tmp_path / "results").exists()
