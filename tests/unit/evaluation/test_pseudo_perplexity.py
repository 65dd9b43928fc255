"""From folders and texts to records: against a plain computation, resumed, and with other settings."""

import dataclasses
import json
import math
from pathlib import Path
from statistics import fmean

import pytest
from unit.evaluation.pseudo_perplexity_models import LONGEST, make_texts, plain_losses, write_model

from megatron_neobert.evaluation import pseudo_perplexity
from megatron_neobert.evaluation.ledger import Ledger
from megatron_neobert.evaluation.options import PerplexityOptions
from megatron_neobert.evaluation.pseudo_perplexity import document_id, evaluate_model

TEXTS = make_texts(12, longest=LONGEST - 2)
NEAR = 1e-5  # relative; measured: 1e-7


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_model(folder / kind, kind) for kind in ("Bert", "EuroBert")}


@pytest.fixture
def options(models, tmp_path) -> PerplexityOptions:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))
    return PerplexityOptions(
        model=(models["Bert"],),
        data=(str(path),),
        output=tmp_path,
        min_length=1,
        batch_tokens=100,
        device="cpu",
    )


def measure(options, **changes):
    options = dataclasses.replace(options, **changes)
    return evaluate_model(options.model[0], options)


def results_in(output, model="Bert"):
    """Results by document of everything in the ledger."""
    ledger = Ledger(output / model / "pseudo_perplexity")
    return [(line["unit"]["document"], line["result"]) for line in ledger.lines.values()]


def test_every_document_gets_the_losses_of_a_plain_computation(models, options, tmp_path):
    folder = models["EuroBert"]
    outcome = measure(options, model=(folder,))
    losses = {document_id(text): plain_losses(folder, text) for text in TEXTS}
    found = dict(results_in(tmp_path, "EuroBert"))
    assert {id: line["nll_sum"] for id, line in found.items()} == pytest.approx(
        {id: sum(values) for id, values in losses.items()}, rel=NEAR
    )
    assert {id: line["positions"] for id, line in found.items()} == {id: len(values) for id, values in losses.items()}
    everything = [loss for values in losses.values() for loss in values]
    assert outcome["pseudo_perplexity"] == pytest.approx(math.exp(fmean(everything)), rel=NEAR)
    assert outcome["standard_error"] == 0


def test_drawn_positions_come_near_the_whole_and_say_how_near(options):
    whole, drawn = measure(options), measure(options, positions_per_doc=6)
    assert drawn["pseudo_perplexity"] != whole["pseudo_perplexity"]
    assert abs(drawn["pseudo_perplexity"] - whole["pseudo_perplexity"]) < 3 * drawn["standard_error"]


def test_interrupted_run_resumes_where_it_was_and_ends_the_same(options, tmp_path, monkeypatch):
    outcome = measure(options, output=tmp_path / "whole")
    score, batches = pseudo_perplexity.Scorer.score, []

    def interrupted(self, rows):
        batches.append(len(rows))
        if len(batches) == 60:
            raise KeyboardInterrupt
        return score(self, rows)

    monkeypatch.setattr(pseudo_perplexity.Scorer, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(options, output=tmp_path / "resumed")
    done = results_in(tmp_path / "resumed")
    assert 0 < len(done) < len(TEXTS)
    batches.clear()
    batches.extend([0] * 100)
    resumed = measure(options, output=tmp_path / "resumed")
    assert sum(batches) == sum(result["positions"] for _, result in results_in(tmp_path / "resumed")[len(done) :])
    whole = {(id, result["positions"]) for id, result in results_in(tmp_path / "whole")}
    assert {(id, result["positions"]) for id, result in results_in(tmp_path / "resumed")} == whole
    assert resumed["pseudo_perplexity"] == pytest.approx(outcome["pseudo_perplexity"], rel=NEAR)  # other batches
    batches[:] = [0] * 100
    assert measure(options, output=tmp_path / "resumed") == resumed
    assert sum(batches) == 0


def test_documents_are_measured_again_with_other_settings_and_not_with_another_choice_of_documents(options, tmp_path):
    def measured_after(**changes):
        measure(options, **changes)
        return len(results_in(tmp_path))

    assert measured_after(limit=4) == 4
    assert measured_after(limit=2) == 4
    assert measured_after(seed=1, limit=4) == 4  # draws nothing
    assert measured_after(positions_per_doc=3, limit=4) == 8
    assert measured_after(positions_per_doc=3, seed=1, limit=4) == 12
    assert measured_after(max_length=8, limit=4) == 16
