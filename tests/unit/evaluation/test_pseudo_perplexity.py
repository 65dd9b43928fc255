"""Pseudo-perplexity from texts to results: equal to a plain computation, resumed, and with changed settings."""

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
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", "EuroBert")


@pytest.fixture
def measure(folder, tmp_path):
    """Return a function that measures the model with the given options."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))
    options = PerplexityOptions(
        model=(folder,), data=(str(path),), output=tmp_path, min_length=1, batch_tokens=100, device="cpu"
    )
    return lambda **changes: evaluate_model(folder, dataclasses.replace(options, **changes))


def documents_in(output):
    """Return (id, result) of every document in the ledger."""
    ledger = Ledger(output / "model" / "pseudo_perplexity")
    return [(line["unit"]["document"], line["result"]) for line in ledger.lines.values()]


def test_every_document_has_the_losses_of_a_plain_computation(folder, measure, tmp_path):
    results = measure()
    losses = {document_id(text): plain_losses(folder, text) for text in TEXTS}
    documents = dict(documents_in(tmp_path))
    sums = {id_: document["nll_sum"] for id_, document in documents.items()}
    assert sums == pytest.approx({id_: sum(values) for id_, values in losses.items()}, rel=NEAR)
    counts = {id_: document["positions"] for id_, document in documents.items()}
    assert counts == {id_: len(values) for id_, values in losses.items()}
    mean = fmean(loss for values in losses.values() for loss in values)
    assert results["pseudo_perplexity"] == pytest.approx(math.exp(mean), rel=NEAR)
    assert results["standard_error"] == 0


def test_interrupted_run_resumes_with_the_unfinished_documents_and_gives_the_same_result(
    measure, tmp_path, monkeypatch
):
    whole = measure(output=tmp_path / "whole")
    score, scored, interrupt_at = pseudo_perplexity.Scorer.score, [], 60

    def counting_score(self, documents):
        scored.append(len(documents))
        if len(scored) == interrupt_at:
            raise KeyboardInterrupt
        return score(self, documents)

    monkeypatch.setattr(pseudo_perplexity.Scorer, "score", counting_score)
    with pytest.raises(KeyboardInterrupt):
        measure(output=tmp_path / "resumed")
    finished = documents_in(tmp_path / "resumed")
    assert 0 < len(finished) < len(TEXTS)
    interrupt_at = None
    scored.clear()
    resumed = measure(output=tmp_path / "resumed")
    documents = documents_in(tmp_path / "resumed")
    assert sum(scored) == sum(result["positions"] for _, result in documents[len(finished) :])
    assert {id_ for id_, _ in documents} == {id_ for id_, _ in documents_in(tmp_path / "whole")}
    # The documents are in other batches.
    assert resumed["pseudo_perplexity"] == pytest.approx(whole["pseudo_perplexity"], rel=NEAR)
    scored.clear()
    assert measure(output=tmp_path / "resumed") == resumed
    assert scored == []


def test_changed_settings_measure_documents_again_and_another_selection_does_not(measure, tmp_path):
    def documents_after(**changes):
        measure(**changes)
        return len(documents_in(tmp_path))

    assert documents_after(limit=4) == 4
    assert documents_after(limit=2) == 4
    assert documents_after(seed=1, limit=4) == 4, "without --positions-per-doc, nothing is drawn"
    assert documents_after(positions_per_doc=3, limit=4) == 8
    assert documents_after(positions_per_doc=3, seed=1, limit=4) == 12
    assert documents_after(max_length=8, limit=4) == 16
