"""From folders and texts to records: against a plain computation, resumed, and with other settings."""

import csv
import json
import math
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import pytest
from unit.evaluation.pseudo_perplexity_models import LONGEST, make_texts, plain_losses, write_model

from megatron_neobert.errors import OutputError
from megatron_neobert.evaluation.encoders import fingerprint
from megatron_neobert.evaluation.pseudo_perplexity.documents import Choice, document_id
from megatron_neobert.evaluation.pseudo_perplexity.run import Evaluation, evaluate, write_curves
from megatron_neobert.evaluation.records import hold, read_record

TEXTS = make_texts(12, longest=LONGEST - 2)
NEAR = 1e-5  # relative; measured: 1e-7


class Progress:
    """Counts tokens, and stops the work after some of them, as Ctrl-C does."""

    def __init__(self, stop_after=math.inf):
        self.tokens, self.total, self.stop_after = 0, 0, stop_after

    @contextmanager
    def __call__(self, name, total):
        self.total = total
        yield self.add

    def add(self, tokens):
        self.tokens += tokens
        if self.tokens > self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_model(folder / kind, kind) for kind in ("Bert", "EuroBert")}


@pytest.fixture
def evaluation(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))

    def build(**choice):
        return Evaluation(inputs=(str(path),), choice=Choice(**{"length_bins": (16, 64), **choice}), batch_tokens=100)

    return build


def lines_of(place: Path) -> dict[str, list[str]]:
    """File of documents -> its lines."""
    return {path.name: sorted(path.read_text().splitlines()) for path in place.glob("*.jsonl")}


def documents_in(place: Path) -> set[tuple[str, int]]:
    """Names and numbers of positions, each of them once."""
    [lines] = lines_of(place).values()
    found = [(line["id"], line["positions"]) for line in map(json.loads, lines)]
    assert len(found) == len(set(found))
    return set(found)


def test_every_document_gets_the_losses_of_a_plain_computation(models, evaluation, tmp_path):
    folder = models["EuroBert"]
    outcome = evaluate(folder, tmp_path, evaluation(), Progress())
    losses = {document_id(text): plain_losses(folder, text) for text in TEXTS}
    [lines] = lines_of(tmp_path / "EuroBert").values()
    found = {line["id"]: line for line in map(json.loads, lines)}
    assert {id: line["nll_sum"] for id, line in found.items()} == pytest.approx(
        {id: sum(values) for id, values in losses.items()}, rel=NEAR
    )
    assert {id: line["positions"] for id, line in found.items()} == {id: len(values) for id, values in losses.items()}
    everything = [loss for values in losses.values() for loss in values]
    assert outcome["pseudo_perplexity"] == pytest.approx(math.exp(fmean(everything)), rel=NEAR)
    assert outcome["standard_error"] == 0


def test_drawn_positions_come_near_the_whole_and_say_how_near(models, evaluation, tmp_path):
    whole = evaluate(models["Bert"], tmp_path, evaluation(), Progress())
    drawn = evaluate(models["Bert"], tmp_path, evaluation(positions_per_document=6), Progress())
    assert drawn["pseudo_perplexity"] != whole["pseudo_perplexity"]
    assert abs(drawn["pseudo_perplexity"] - whole["pseudo_perplexity"]) < 3 * drawn["standard_error"]


def test_interrupted_run_goes_on_where_it_was_and_ends_the_same(models, evaluation, tmp_path):
    folder, whole = models["Bert"], Progress()
    outcome = evaluate(folder, tmp_path / "whole", evaluation(), whole)
    assert whole.tokens == whole.total

    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, tmp_path / "resumed", evaluation(), Progress(stop_after=whole.total / 2))
    [done] = lines_of(tmp_path / "resumed" / "Bert").values()
    assert 0 < len(done) < len(TEXTS)
    rest = Progress()
    resumed = evaluate(folder, tmp_path / "resumed", evaluation(), rest)
    cost_of_done = sum(json.loads(line)["positions"] * json.loads(line)["length"] for line in done)
    assert rest.tokens == rest.total == whole.total - cost_of_done

    assert documents_in(tmp_path / "resumed" / "Bert") == documents_in(tmp_path / "whole" / "Bert")
    assert resumed["pseudo_perplexity"] == pytest.approx(
        outcome["pseudo_perplexity"], rel=NEAR
    )  # other rows share a batch

    again = Progress()
    assert evaluate(folder, tmp_path / "resumed", evaluation(), again) == resumed
    assert again.total == again.tokens == 0


def test_second_command_on_the_same_output_is_refused(models, evaluation, tmp_path):
    folder = models["Bert"]
    with hold(tmp_path / folder.name / "pseudo_perplexity.lock"), pytest.raises(OutputError, match="another command"):
        evaluate(folder, tmp_path, evaluation(), Progress())


def test_other_settings_go_into_a_file_of_their_own_and_other_choices_of_documents_do_not(models, evaluation, tmp_path):
    def evaluate_with(**choice):
        progress = Progress()
        evaluate(models["Bert"], tmp_path, evaluation(**choice), progress)
        return progress.total, len(lines_of(tmp_path / "Bert"))

    assert evaluate_with(limit=4)[1] == 1
    assert evaluate_with(limit=2, length_bins=(8, 16, 32)) == (0, 1)
    assert evaluate_with(seed=1, limit=4) == (0, 1)  # draws nothing
    assert evaluate_with(positions_per_document=3)[1] == 2
    assert evaluate_with(positions_per_document=3, seed=1)[1] == 3
    assert evaluate_with(max_length=8)[1] == 4


def test_record_says_what_was_measured_and_how(models, evaluation, tmp_path):
    evaluate(models["Bert"], tmp_path, evaluation(positions_per_document=3, seed=7, limit=5), Progress())
    record = read_record(tmp_path / "Bert" / "pseudo_perplexity.json")
    assert record["kind"] == "pseudo_perplexity"
    assert record["model"]["fingerprint"] == record["settings"]["model"] == fingerprint(models["Bert"])
    expected = {"positions_per_document": 3, "seed": 7, "max_length": LONGEST, "limit": 5, "dtype": "float32"}
    assert record["settings"].items() >= expected.items()
    assert record["settings"]["head"] == "masked position"
    assert record["results"]["documents"] == 5
    assert sum(point["documents"] for point in record["results"]["curve"]) == 5


def test_curves_of_several_models_share_a_table_and_a_figure(models, evaluation, tmp_path):
    results = {name: evaluate(folder, tmp_path, evaluation(), Progress()) for name, folder in models.items()}
    write_curves(tmp_path, results)
    with (tmp_path / "pseudo_perplexity.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["model"], row["up_to"]) for row in rows] == [(name, end) for name in models for end in ("16", "64")]
    assert [float(row["pseudo_perplexity"]) for row in rows] == [
        point["pseudo_perplexity"] for found in results.values() for point in found["curve"]
    ]
    assert (tmp_path / "pseudo_perplexity.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert all(f"| {name} | " in (tmp_path / "pseudo_perplexity.md").read_text() for name in models)
