"""`neobert evaluate ppl` as a user calls it: a first time, a second time, and refused."""

import pytest
from commands import call
from json_files import read_json, write_jsonl
from unit.evaluation.pseudo_perplexity_models import LONGEST, make_texts, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with two models, a folder that has only a config, and texts."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "bert", "Bert")
    write_model(folder / "ours", "neobert")
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in make_texts(20, longest=38)])
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
        (["bert"], ("--text-key", "body"), 65, "has no document to measure (20 x missing key); check --text-key body"),
    ],
)
def test_models_and_data_that_cannot_be_measured_are_refused(folder, tmp_path, models, flags, code, problem):
    ended, _, errors = evaluate(folder, tmp_path, *models, flags=flags)
    assert ended == code and problem in errors


# --- neobert evaluate throughput and neobert report; nothing is timed


SIZES = ("--lengths", 16, LONGEST + 8, "--batch-sizes", 1, 2, "--steps", 2, "--warmup", 1)


def test_models_are_measured_at_every_length_they_support_and_shown_in_the_report(folder, tmp_path):
    output = tmp_path / "results"
    models = (folder / "bert", folder / "ours")
    _, printed, _ = call("evaluate throughput", "--model", *models, "--output", output, *SIZES)
    assert f"not measured: bert, {LONGEST + 8} tokens; at most {LONGEST} learned positions" in printed
    records = [read_json(output / name / "throughput.json") for name in ("bert", "ours")]
    rows = [row for record in records for row in record["results"]["rows"]]
    lengths = {(row["model"], row["length"]) for row in rows}
    assert lengths == {("bert", 16), ("ours", 16), ("ours", LONGEST + 8)}
    assert (output / "throughput.png").read_bytes()[:4] == b"\x89PNG"
    call("report", "--results", output, "--output", tmp_path / "report")
    fastest = max(row["measured"]["tokens_per_second"][1] for row in rows if row["model"] == "bert")
    assert f"| {fastest:,.0f} (" in (tmp_path / "report" / "report.md").read_text()


def test_model_that_supports_none_of_the_lengths_is_refused_before_anything_is_written(folder, tmp_path):
    flags = ("--model", folder / "bert", "--output", tmp_path / "results", "--lengths", LONGEST + 1)
    code, _, errors = call("evaluate throughput", *flags)
    assert code == 2 and f"at most {LONGEST} learned positions" in errors
    assert not (tmp_path / "results").exists()
