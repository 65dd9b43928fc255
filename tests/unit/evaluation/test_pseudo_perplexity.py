"""Pseudo-perplexity: documents, positions, losses equal to a plain computation, resuming, errors and averages."""

import dataclasses
import math
from itertools import combinations
from pathlib import Path
from statistics import fmean, pvariance, variance

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from json_files import edit_json, write_jsonl
from scipy import stats
from unit.evaluation.pseudo_perplexity_models import ARCHITECTURES, LONGEST, make_texts, plain_losses, write_model

from megatron_neobert.errors import ConfigError, ConversionError, DivergenceError
from megatron_neobert.evaluation.ledger import open_ledger
from megatron_neobert.evaluation.models import FLOAT32_ON_CPU, load_tokenizer
from megatron_neobert.evaluation.options import PerplexityOptions
from megatron_neobert.evaluation.pseudo_perplexity import (
    DocumentResult,
    Scorer,
    average_by_length,
    average_over_tokens,
    evaluate_model,
    select_documents,
)

TEXTS = make_texts(12, longest=LONGEST - 2)
NEAR = 1e-5  # relative; measured: 1e-7


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", "EuroBert")


@pytest.fixture
def measure(folder, tmp_path):
    """Return a function that measures the model with the given options."""
    path = write_jsonl(tmp_path / "texts.jsonl", [{"content": text} for text in TEXTS])
    options = PerplexityOptions(
        model=(folder,), data=(str(path),), output=tmp_path, min_length=1, batch_tokens=100, device="cpu"
    )
    return lambda **changes: evaluate_model(folder, dataclasses.replace(options, **changes))


def documents_in(output):
    """Return the result of every document in the ledger."""
    with open_ledger(output / "model" / "pseudo_perplexity") as ledger:
        return [line["result"] for line in ledger.lines.values()]


def test_result_is_that_of_a_plain_computation(folder, measure):
    results = measure()
    losses = [plain_losses(folder, text) for text in TEXTS]
    mean = fmean(loss for values in losses for loss in values)
    assert results["pseudo_perplexity"] == pytest.approx(math.exp(mean), rel=NEAR)
    assert results["standard_error"] == 0


def test_interrupted_run_resumes_with_the_unfinished_documents_and_gives_the_same_result(
    measure, tmp_path, monkeypatch
):
    whole, output = measure(output=tmp_path / "whole"), tmp_path / "resumed"
    score, scored = Scorer.score, []

    def counting_score(self, ids_s, positions):
        scored.append(len(positions))
        if len(scored) == 60:
            raise KeyboardInterrupt
        return score(self, ids_s, positions)

    monkeypatch.setattr(Scorer, "score", counting_score)
    with pytest.raises(KeyboardInterrupt):
        measure(output=output)
    finished = len(documents_in(output))
    assert 0 < finished < len(TEXTS)
    resumed = measure(output=output)
    assert sum(scored[60:]) == sum(result["positions"] for result in documents_in(output)[finished:])
    assert resumed["pseudo_perplexity"] == whole["pseudo_perplexity"]
    calls = len(scored)
    assert measure(output=output) == resumed and len(scored) == calls


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


# --- which documents are measured, and which of their positions are masked


SHORT_TEXTS = ["the cat sat", "a mat", "the cat sat on the mat . a cat", "cat"]  # of 3, 2, 9 and 1 tokens
ADDED = 2  # [CLS] and [SEP]


@pytest.fixture
def select(folder, tmp_path):
    """Return a function that selects from texts, or from the files of a folder."""

    def run(data, *, max_length=40, **options):
        if isinstance(data, list):
            data = write_jsonl(tmp_path / "texts.jsonl", [{"content": text} for text in data])
        defaults = {"model": (), "output": "out", "data": (str(data),), "min_length": 1}
        return select_documents(PerplexityOptions(**{**defaults, **options}), load_tokenizer(folder), max_length)

    return run


def test_tokens_added_by_the_tokenizer_are_never_masked_and_written_ones_are_plain_text(folder, select):
    [document], _ = select(["cat [SEP] sat"])
    tokens = load_tokenizer(folder).convert_ids_to_tokens(document.ids_s.tolist())
    assert tokens == ["[CLS]", "cat", "[", "sep", "]", "sat", "[SEP]"]
    assert (document.positions, document.scorable) == ((1, 2, 3, 4, 5), 5)


def test_documents_do_not_depend_on_the_format_the_order_and_the_number_of_files(select, tmp_path):
    def describe(data):
        documents, _ = select(data, positions_per_doc=2)
        return {(document.id, tuple(document.ids_s.tolist()), document.positions) for document in documents}

    texts = make_texts(20, longest=12)
    for name in ("table", "texts"):
        (tmp_path / name).mkdir()
    pq.write_table(pa.table({"content": texts[7:]}), tmp_path / "table" / "a.parquet")
    pq.write_table(pa.table({"content": texts[:7]}), tmp_path / "table" / "b.parquet")
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    expected = describe(texts)
    assert len(expected) == len(texts)
    assert describe(tmp_path / "table") == describe(tmp_path / "texts") == expected


def test_truncated_document_has_the_truncated_length(select):
    cut, whole = select(SHORT_TEXTS[2:], max_length=6)[0]
    assert (len(cut.ids_s), cut.scorable, cut.positions, cut.truncated) == (6, 4, (1, 2, 3, 4), True)
    assert (len(whole.ids_s), whole.truncated) == (1 + ADDED, False)


@pytest.mark.parametrize(
    ("texts", "options", "tokens", "dropped"),
    [
        ([*SHORT_TEXTS, SHORT_TEXTS[0]], {}, [3, 2, 9, 1], {"met before": 1}),
        (SHORT_TEXTS, {"min_length": 4}, [3, 2, 9], {"shorter than --min-length": 1}),
        (SHORT_TEXTS, {"limit": 2}, [3, 2], {}),
    ],
)
def test_duplicates_and_short_documents_are_dropped_and_counted_up_to_the_limit(
    select, texts, options, tokens, dropped
):
    documents, counts = select(texts, **options)
    assert [len(document.ids_s) for document in documents] == [count + ADDED for count in tokens]
    assert counts == dropped


# --- standard errors, averages and bands


def result_of(losses, *, tokens=None, length=10):
    return DocumentResult(
        id="a",
        length=length,
        truncated=False,
        tokens=tokens or len(losses),
        positions=len(losses),
        nll_sum=sum(losses),
        nll_variance=variance(losses) if len(losses) > 1 else None,
    )


@pytest.mark.parametrize("drawn", [2, 3, 5])
def test_mean_squared_standard_error_is_the_variance_of_the_mean_over_all_draws(drawn):
    losses = [0.1, 0.4, 2.0, 3.5, 9.0, 0.7]
    results = [result_of(list(chosen), tokens=len(losses)) for chosen in combinations(losses, drawn)]
    assert fmean(r.standard_error**2 for r in results) == pytest.approx(pvariance(r.mean_nll for r in results))
    assert fmean(r.mean_nll for r in results) == pytest.approx(fmean(losses))


def test_documents_are_weighted_by_their_tokens_however_many_were_drawn():
    short, long = result_of([1.0, 3.0]), result_of([4.0, 6.0], tokens=100)
    average = average_over_tokens([short, long])
    mean = (2 * 2.0 + 100 * 5.0) / 102
    assert average["nats_per_token"] == pytest.approx(mean)
    assert average["pseudo_perplexity"] == pytest.approx(math.exp(mean))
    # All tokens of the short document were masked; of the long one 2 of 100, and their losses have variance 2.
    assert average["standard_error"] == pytest.approx(math.exp(mean) * 100 * math.sqrt(2 / 2 * (1 - 2 / 100)) / 102)
    assert average_over_tokens([short, result_of([4.0], tokens=100)])["standard_error"] is None


def test_bin_includes_the_length_at_its_end():
    results = [result_of([1.0], length=length) for length in (1, 128, 129, 256, 257, 9000)]
    bins = [(b["above"], b["up_to"], b["documents"], b["mean_length"]) for b in average_by_length(results)]
    assert bins == [(0, 128, 2, 64.5), (128, 256, 2, 192.5), (256, 512, 1, 257), (8192, 16384, 1, 9000)]


def test_band_is_students_interval_over_documents_and_missing_for_a_few():
    means = [1.0, 2.5, 1.5, 3.0, 2.2, 0.9]
    [few] = average_by_length([result_of([1.0]), result_of([2.0])])
    assert (few["documents"], few["low"], few["high"]) == (2, None, None)
    [point] = average_by_length([result_of([mean - 0.5, mean + 0.5]) for mean in means])
    low, high = stats.t.interval(0.95, len(means) - 1, loc=fmean(means), scale=stats.sem(means))
    assert (point["low"], point["high"]) == pytest.approx((math.exp(low), math.exp(high)))
    assert point["pseudo_perplexity"] == pytest.approx(math.exp(fmean(means)))


# --- losses of single masked tokens equal one plain forward pass per token


SENTENCES = ["the cat sat on a mat .", "cat", "a mat sat on the cat on the mat . the cat ."]
NEAR_NATS = 1e-4  # nats; measured: up to 4e-6


@pytest.fixture
def scorer(tmp_path):
    return Scorer(write_model(tmp_path / "model", "Bert"), FLOAT32_ON_CPU)


def mask_each_token(scorer, text):
    ids_s = torch.tensor(scorer.tokenizer(text)["input_ids"], dtype=torch.int32)
    return scorer.score(ids_s, range(1, len(ids_s) - 1))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_losses_of_a_batch_equal_a_plain_forward_pass_per_token(kind, tmp_path):
    folder = write_model(tmp_path / kind, kind)
    scorer = Scorer(folder, FLOAT32_ON_CPU)
    losses = [loss for text in SENTENCES for loss in mask_each_token(scorer, text)]
    assert losses == pytest.approx([loss for text in SENTENCES for loss in plain_losses(folder, text)], abs=NEAR_NATS)


def test_losses_without_the_mask_or_with_the_special_tokens_differ(scorer):
    """Control: the comparison above would detect either mistake."""
    right = plain_losses(scorer.folder, SENTENCES[0])
    unmasked = plain_losses(scorer.folder, SENTENCES[0], with_mask=False)
    assert np.abs(np.subtract(right, unmasked)).min() > 100 * NEAR_NATS
    specials = plain_losses(scorer.folder, SENTENCES[0], with_specials=True)
    assert abs(np.mean(specials) - np.mean(right)) > 100 * NEAR_NATS


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_longest_input_of_learned_positions_is_scored_and_a_longer_one_is_refused(kind, tmp_path):
    folder = write_model(tmp_path / "model", kind)
    with pytest.raises(ConfigError, match=f"--max-length {LONGEST + 1}: .* has {LONGEST} learned positions"):
        Scorer(folder, FLOAT32_ON_CPU, LONGEST + 1)
    scorer = Scorer(folder, FLOAT32_ON_CPU)
    assert scorer.max_length == LONGEST
    longest = torch.full((LONGEST,), 5, dtype=torch.int32)
    assert math.isfinite(scorer.score(longest, [LONGEST - 1])[0])


def test_tokenizer_without_a_mask_token_is_refused(tmp_path):
    folder = write_model(tmp_path / "model", "EuroBert")  # a BERT's tokenizer has one by default
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        edit_json(folder / name, mask_token=...)
    with pytest.raises(ConversionError, match="its tokenizer has no mask token"):
        Scorer(folder, FLOAT32_ON_CPU)


def test_loss_that_is_not_finite_is_refused(scorer):
    with torch.no_grad():
        scorer.model.get_output_embeddings().bias.fill_(float("nan"))
    with pytest.raises(DivergenceError, match="gives nan instead of a loss in float32"):
        mask_each_token(scorer, "cat")
