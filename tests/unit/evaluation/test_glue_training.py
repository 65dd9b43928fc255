"""One fine-tuning run, and the scores of several: schedule, heads, the start from MNLI, metrics and averages."""

import dataclasses
import json
import re
import statistics
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from commands import largest_file
from safetensors.torch import load_file
from unit.evaluation.glue_inputs import POINT, build_run, write_inputs
from unit.evaluation.pseudo_perplexity_models import ARCHITECTURES, write_model

from megatron_neobert.errors import ConversionError, SaveError
from megatron_neobert.evaluation import fine_tune as fine_tuning
from megatron_neobert.evaluation.fine_tune import (
    WEIGHTS,
    Outcome,
    PaperTrainer,
    Point,
    evaluation_interval,
    fine_tune,
    rate_factor,
    run_all,
    seconds_left,
)
from megatron_neobert.evaluation.glue import TASKS, choose_grid
from megatron_neobert.evaluation.models import load_tokenizer
from megatron_neobert.evaluation.options import GlueOptions
from megatron_neobert.evaluation.sweep import summarise

pytestmark = pytest.mark.filterwarnings("ignore:.*rows, the benchmark:UserWarning")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="module")
def mnli(inputs):
    """Weights and outcome of a finished run on MNLI."""
    run = build_run(inputs, "mnli")
    return run.folder / WEIGHTS, fine_tune(run)


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 0.0), (3, 0.5), (6, 1.0), (48, 0.1 + 0.9 * (90 - 48) / (90 - 6)), (90, 0.1), (99, 0.1)],
)
def test_rate_warms_up_over_6_percent_and_falls_to_a_tenth_at_90_percent(step, factor):
    assert rate_factor(step, total=100) == pytest.approx(factor)


@pytest.mark.parametrize(("batches", "steps"), [(24_544, 500), (311, 31), (10, 1), (3, 1)])
def test_evaluations_are_a_tenth_of_an_epoch_apart_and_at_most_500_steps(batches, steps):
    assert evaluation_interval(batches) == steps


def test_optimizer_and_evaluations_are_the_papers(inputs):
    arguments = PaperTrainer(build_run(inputs, "rte")).args
    assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.9, 0.95, 1e-8)
    assert (arguments.max_grad_norm, arguments.eval_steps, arguments.metric_for_best_model) == (0.0, 1, "accuracy")


def test_scores_are_reproduced_by_the_weights_that_are_kept(inputs, mnli):
    folder, outcome = mnli
    run = build_run(inputs, "mnli")
    model, tokenizer = TASKS["mnli"].load(folder), load_tokenizer(folder)
    for split, metric in (("validation_matched", "accuracy"), ("validation_mismatched", "accuracy_mismatched")):
        rows = run.task.encode(split, run.options, tokenizer, 40)
        with torch.no_grad():
            predicted = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax().item() for row in rows]
        correct = sum(label == row["labels"] for label, row in zip(predicted, rows, strict=True))
        assert outcome.scores[metric] == correct / len(rows)
    assert outcome.average == pytest.approx(sum(outcome.scores.values()) / 2)
    assert not list(folder.parent.glob("checkpoint-*"))
    assert not {"training_args.bin", "trainer_state.json"} & {path.name for path in folder.iterdir()}
    tokenizer_files = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    for name in tokenizer_files:  # transformers 4 cannot read the class TokenizersBackend, which version 5 would write
        assert (folder / name).read_bytes() == (run.start / name).read_bytes()


def test_limit_takes_rows_from_all_parts_of_a_split(inputs):
    run = build_run(inputs, "stsb")
    tokenizer = load_tokenizer(run.start)
    rows = [
        run.task.encode("train", build_run(inputs, "stsb", limit=limit).options, tokenizer, 40) for limit in (5, None)
    ]
    assert rows[0].to_list() == [rows[1][48 * number // 5] for number in range(5)]


def test_run_learns_a_simple_task_and_is_repeatable(inputs):
    run = build_run(inputs, "rte", epochs=6)
    outcome = fine_tune(run)
    assert outcome.average == 1.0
    ((_, again),) = run_all([run], jobs=2)
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(outcome, seconds=0.0)


def test_run_ends_when_evaluations_do_not_improve(inputs, monkeypatch):
    monkeypatch.setattr(fine_tuning, "PATIENCE", 2)
    run = build_run(inputs, "rte", epochs=50, point=dataclasses.replace(POINT, learning_rate=1e-12))
    outcome = fine_tune(run)
    assert outcome.steps == outcome.best_step + 2  # an evaluation per step


def test_run_shows_every_step_and_the_time_that_all_runs_may_take(inputs, monkeypatch):
    bar = mock.Mock()
    monkeypatch.setattr(fine_tuning, "progress_bar", drawn := mock.Mock(return_value=bar))
    run = dataclasses.replace(build_run(inputs, "rte"), number=2, count=6)
    steps = fine_tune(run).steps
    drawn.assert_called_once_with(desc="rte 2/6", total=steps, unit="step", position=0)
    assert bar.update.call_count == steps and bar.close.call_count == 1
    assert all(re.fullmatch(r"all runs at most \d+:\d\d:\d\d", *each.args) for each in bar.set_postfix_str.mock_calls)
    assert seconds_left(run, 30.0, done=0.5) == 30 + 4 * 60
    in_parallel = dataclasses.replace(run, options=dataclasses.replace(run.options, jobs=3))
    assert seconds_left(in_parallel, 30.0, done=0.5) == 30 + 2 * 60, "three runs at once, then one"


def test_stsb_is_a_regression_even_from_the_mnli_model(inputs, mnli):
    outcome = fine_tune(build_run(inputs, "stsb", start=mnli[0], epochs=8))
    assert outcome.scores["pearson"] > 0.5
    config = json.loads((inputs / "runs" / f"stsb-{POINT.name}" / WEIGHTS / "config.json").read_text())
    assert config["problem_type"] == "regression"


def test_full_disk_is_an_error_of_the_output(inputs):
    with largest_file(20_000), pytest.raises(SaveError, match=r"rte-.* cannot be written"):
        fine_tune(build_run(inputs, "rte"))


@pytest.mark.parametrize("kind", ["EuroBert", "neobert"])
def test_transfer_keeps_all_layers_of_our_exports_except_the_output_layer(tmp_path, kind):
    write_model(tmp_path / "pretrained", kind)
    torch.manual_seed(0)
    source = TASKS["mnli"].load(tmp_path / "pretrained")
    source.save_pretrained(tmp_path / "mnli")
    loaded = TASKS["rte"].load(tmp_path / "mnli").state_dict()
    different = {name for name, value in source.state_dict().items() if not torch.equal(loaded[name], value)}
    assert different == {"classifier.weight"} | ({"classifier.bias"} & different)
    assert "dense.weight" in loaded


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_encoder_gets_a_head_and_its_weights_change(inputs, tmp_path, kind):
    start = write_model(tmp_path / kind, kind)
    run = build_run(inputs, "rte", start=start, limit=24, epochs=1)
    outcome = fine_tune(dataclasses.replace(run, folder=tmp_path / "run"))
    before, after = (load_file(path / "model.safetensors") for path in (start, tmp_path / "run" / WEIGHTS))
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
    assert 0 <= outcome.average <= 1


def test_head_on_the_last_token_is_refused(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=15, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match="LlamaForSequenceClassification classifies by the last token"):
        TASKS["rte"].load(tmp_path)


# --- scores: metrics, the best point of a grid, and the average over tasks


LABELS = np.array([1, 1, 1, 0, 0, 0, 0, 1])
PREDICTED = np.array([1, 1, 0, 0, 0, 1, 0, 1])


def score(task, logits, labels=LABELS):
    return TASKS[task].score(transformers.EvalPrediction(logits, labels), None)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("cola", {"matthews": 0.5}),
        ("mrpc", {"accuracy": 6 / 8, "f1": 6 / 8}),
        ("qqp", {"accuracy": 6 / 8, "f1": 6 / 8}),
        ("rte", {"accuracy": 6 / 8}),
    ],
)
def test_classification_scores_are_the_metrics_of_the_task(task, expected):
    assert score(task, np.eye(2)[PREDICTED]) == pytest.approx(expected)


def test_stsb_scores_are_pearson_and_spearman_correlations():
    labels, predicted = np.array([0.0, 1.0, 2.5, 4.0, 5.0]), np.array([0.3, 0.1, 2.0, 9.0, 4.0])
    expected = {"pearson": np.corrcoef(labels, predicted)[0, 1], "spearman": 0.8}
    assert score("stsb", predicted[:, None], labels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("task", "logits"),
    [("stsb", np.full((8, 1), 2.0)), ("mrpc", np.full((8, 2), np.nan)), ("stsb", np.full((8, 1), np.inf))],
)
def test_undefined_metrics_count_as_0_with_a_warning(task, logits):
    with pytest.warns(Warning, match="not finite|is constant"):
        assert set(score(task, logits).values()) == {0.0}
    assert score("cola", np.tile([0.0, 1.0], (8, 1))) == {"matthews": 0.0}


# --- results


def outcome(score: float) -> Outcome:
    return Outcome(scores={"accuracy": score}, average=score, best_step=1, steps=2, seconds=60.0)


def point(batch_size: int, seed: int) -> Point:
    return Point(batch_size=batch_size, learning_rate=1e-5, weight_decay=1e-2, seed=seed)


def test_default_is_the_papers_best_point_and_options_replace_its_values():
    options = GlueOptions(model=Path("m"), data_dir=Path("d"), output=Path("o"))
    assert choose_grid(options, "sst2").points([7]) == [
        Point(batch_size=32, learning_rate=8e-6, weight_decay=1e-2, seed=7)
    ]
    points = choose_grid(dataclasses.replace(options, batch_size=(4, 8)), "sst2").points([0])
    assert [(point.batch_size, point.learning_rate) for point in points] == [(4, 8e-6), (8, 8e-6)]


def test_point_with_the_best_mean_wins_and_not_the_point_with_the_best_run():
    scores = {point(8, 0): 0.9, point(8, 1): 0.1, point(16, 0): 0.6, point(16, 1): 0.7}
    summary = summarise({run: outcome(score) for run, score in scores.items()})
    assert (summary["best_point"]["batch_size"], summary["seeds"], summary["points"]) == (16, [0, 1], 2)
    assert summary["score"] == {"mean": pytest.approx(0.65), "sd": pytest.approx(statistics.stdev([0.6, 0.7]))}
    assert summary["seconds"] == 4 * 60
