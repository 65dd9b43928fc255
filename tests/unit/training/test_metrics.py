"""What an interval logs of its steps, skipped ones among them, and how it reads."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_neobert.config.schema import CheckpointConfig, Settings, TrainingConfig
from megatron_neobert.inspection.run_log import read_run
from megatron_neobert.model.flops import training_flops_per_token
from megatron_neobert.state import MetricSums, StepResult, TrainState
from megatron_neobert.training.metrics import Interval, Monitor

NAN = float("nan")
TOKENS, PAIRS = 50, 20**2 + 30**2  # of a step: two documents


def report(loss: float = 2.0, *, masked: int = 10, skip_reason: str | None = None) -> StepResult:
    """A step of 50 tokens in which every second prediction is right."""
    sums = MetricSums(loss * masked, masked, masked / 2, TOKENS, PAIRS)
    return StepResult(sums, grad_norm=1.0, skip_reason=skip_reason)


def start(tmp_path: Path, *, iteration: int = 0) -> Monitor:
    settings = Settings(training=TrainingConfig(train_iters=10), checkpoint=CheckpointConfig(save=str(tmp_path)))
    return Monitor(settings, iteration=iteration, vocab_size=1000, device=torch.device("cpu"))


def recorded(monitor: Monitor) -> list[dict]:
    path = Path(monitor.settings.checkpoint.save) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def state_of(iteration: int, *, skipped: int = 0, in_a_row: int = 0) -> TrainState:
    return TrainState(corpus_sha256="", iteration=iteration, skipped_iterations=skipped, skipped_in_a_row=in_a_row)


def test_a_skip_is_said_and_recorded_at_once(tmp_path, capsys):
    monitor = start(tmp_path)
    monitor.add(report(NAN, skip_reason="loss nan, gradient norm nan"), state_of(4, skipped=3, in_a_row=2))
    said = "iteration 4/10 | update skipped: loss nan, gradient norm nan | 3 skipped, 2 in a row\n"
    assert capsys.readouterr().out == said
    (line,) = recorded(monitor)
    assert (line["iteration"], line["skipped_iterations"]) == (4, 3)


def test_skipped_steps_count_with_their_tokens_but_enter_no_average(tmp_path):
    monitor = start(tmp_path)
    monitor.add(report(2.0), state_of(1))
    monitor.add(report(NAN, skip_reason="loss nan"), state_of(2, skipped=1, in_a_row=1))
    monitor.add(report(4.0, masked=30), state_of(3, skipped=1))
    progress = monitor.close_interval(state_of(3, skipped=1), lr=1e-4, grad_norm=1.0)
    line = recorded(monitor)[-1]
    assert line["loss"] == (10 * 2.0 + 30 * 4.0) / (10 + 30)
    assert line["masked_accuracy"] == 0.5
    assert progress.consumed_tokens == line["consumed_tokens"] == 3 * TOKENS
    assert line["skipped_iterations"] == 1


def test_an_interval_of_skipped_steps_alone_has_no_loss(tmp_path, capsys):
    monitor = start(tmp_path)
    monitor.add(report(NAN, skip_reason="loss nan, gradient norm nan"), state_of(1, skipped=1, in_a_row=1))
    capsys.readouterr()
    monitor.close_interval(state_of(1, skipped=1, in_a_row=1), lr=1e-4, grad_norm=NAN)
    said = capsys.readouterr().out
    assert said.startswith("iteration 1/10 | loss - | accuracy - | grad norm -\n  lr 1.0e-04 | ")
    assert not {"loss", "masked_accuracy", "grad_norm"} & recorded(monitor)[-1].keys()


def test_the_next_interval_starts_from_nothing(tmp_path):
    monitor = start(tmp_path)
    for iteration, loss in ((1, 2.0), (2, 4.0)):
        monitor.add(report(loss), state_of(iteration))
        monitor.close_interval(state_of(iteration), lr=1e-4, grad_norm=1.0)
    assert [line["loss"] for line in recorded(monitor)] == [2.0, 4.0]
    assert all(line["fill"] == TOKENS / monitor.settings.tokens_per_iteration for line in recorded(monitor))


def test_operations_are_those_of_the_documents_that_were_read(tmp_path):
    monitor = start(tmp_path)
    monitor.add(report(), state_of(1))
    monitor.close_interval(state_of(1), lr=1e-4, grad_norm=1.0)
    (line,) = recorded(monitor)
    expected = training_flops_per_token(monitor.settings, vocab_size=1000, document_tokens=PAIRS / TOKENS)
    assert line["tflops_per_rank"] * 1e12 / line["tokens_per_second"] == pytest.approx(expected)
    assert "mfu" not in line, "a CPU has no peak in the table"


def test_time_spent_waiting_for_a_batch_is_said_as_a_share_and_forgotten_with_the_interval(tmp_path):
    """The loader sleeps before its first batch, training before the second."""
    monitor = start(tmp_path)

    def load():
        time.sleep(0.2)
        yield "first"
        yield "second"

    for iteration, _ in enumerate(monitor.clocked(load()), start=1):
        monitor.add(report(), state_of(iteration))
        monitor.close_interval(state_of(iteration), lr=1e-4, grad_norm=1.0)
        time.sleep(0.2)
    waiting, training = (line["data_wait"] for line in recorded(monitor))
    assert training < 0.5 < waiting


def test_every_line_of_the_record_is_json_that_other_readers_accept(tmp_path):
    monitor = start(tmp_path)
    monitor.add(report(2.0), state_of(1))
    monitor.close_interval(state_of(1), lr=1e-4, grad_norm=NAN)
    monitor.report_validation(state_of(1), {"split": MetricSums(NAN, 2.0, 1.0, 50.0, 100.0)})
    assert "NaN" not in (Path(monitor.settings.checkpoint.save) / "metrics.jsonl").read_text()


def test_run_that_goes_on_says_so_in_its_record_and_one_that_begins_does_not(tmp_path):
    start(tmp_path, iteration=5)  # of another folder's weights: nothing has been recorded here
    first = start(tmp_path)
    first.add(report(), state_of(1))
    first.close_interval(state_of(1), lr=1e-4, grad_norm=1.0)
    assert ["restarted" in line for line in recorded(first)] == [False]
    again = start(tmp_path, iteration=1)
    for iteration in (2, 3):
        again.add(report(), state_of(iteration))
        again.close_interval(state_of(iteration), lr=1e-4, grad_norm=1.0)
    lines = [(line["iteration"], line.get("restarted")) for line in recorded(again)]
    assert lines == [(1, None), (1, 1), (2, None), (3, None)]
    start(tmp_path, iteration=3)  # which finds nothing to do
    assert len(recorded(again)) == len(lines)


def test_line_behind_one_that_a_kill_has_torn_can_still_be_read(tmp_path):
    monitor = start(tmp_path)
    with (tmp_path / "metrics.jsonl").open("w") as stream:
        stream.write('{"iteration": 1, "cursor": {"epo')
    monitor.add(report(2.0), state_of(2))
    monitor.close_interval(state_of(2), lr=1e-4, grad_norm=1.0)
    assert read_run(tmp_path, name="torn").series("loss") == ([2], [2.0])


CPU: dict[str, Any] = {
    "iteration": 120_000,
    "train_iters": 1_000_000,
    "loss": 2.41312,
    "masked_accuracy": 0.5123,
    "lr": 6e-4,
    "grad_norm": 0.8312,
    "ranks": 1,
    "tokens_per_second": 9_342.0,
    "flops_per_second": 14.9e9,
    "peak_tflops": None,
    "memory_gib": 0.84,
    "fill": 0.9941,
    "data_wait": 0.0042,
    "consumed_tokens": 250_000_000_000,
    "skipped_iterations": 0,
    "eta_seconds": 6 * 86_400 + 3 * 3_600 + 59 * 60,
}
EIGHT_GPUS = {"ranks": 8, "tokens_per_second": 1.2e6, "flops_per_second": 8 * 247.25e12, "peak_tflops": 989.0}


def test_lines_of_one_process_on_cpu():
    assert str(Interval(**CPU)) == (
        "iteration 120000/1000000 | loss 2.4131 | accuracy 51.23 % | grad norm 0.831\n"
        "  lr 6.0e-04 | 9.34 k tok/s | 14.9 GFLOP/s | 0.8 GiB | wait 0 % | ETA 6 d 3 h"
    )


def test_lines_of_several_gpus_have_the_throughput_of_all_and_the_mfu_of_one():
    lines = str(Interval(**{**CPU, **EIGHT_GPUS, "memory_gib": 41.23}))
    assert lines.endswith("| 1.20 M tok/s | MFU 25.0 % | 41 GiB | wait 0 % | ETA 6 d 3 h")


@pytest.mark.parametrize("machine", [{}, EIGHT_GPUS])
def test_longest_lines_fit_80_columns(machine):
    extreme = {"iteration": 1_000_000, "loss": 10.3261, "masked_accuracy": 0.9999, "grad_norm": 999.999}
    extreme |= {"memory_gib": 138.9, "data_wait": 0.996, "eta_seconds": (99 * 24 + 23) * 3600}
    extreme |= {"consumed_tokens": 2_100_000_000_000, "skipped_iterations": 999_999}
    for changes in ({}, {"grad_norm": 1e30, "loss": 99.99996}, {"loss": 1e6, "masked_accuracy": 1.0}):
        lines = str(Interval(**{**CPU, **machine, **extreme, **changes})).splitlines()
        assert len(lines) == 2 and max(map(len, lines)) <= 80, lines


def test_record_has_every_value_of_the_line_and_none_that_is_unknown():
    values = Interval(**{**CPU, **EIGHT_GPUS}).values
    assert values["tokens_per_second_per_rank"] == 1.2e6 / 8
    assert values["tflops_per_rank"] == 247.25
    assert values["mfu"] == 247.25 / 989
    said = {"loss", "masked_accuracy", "lr", "grad_norm", "memory_gib", "fill", "data_wait", "eta_seconds"}
    assert said <= set(values)
    assert "mfu" not in Interval(**CPU).values
