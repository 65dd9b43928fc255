"""Values and lines of an interval, with and without skipped updates, and the trackers that record them."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import largest_file

from megatron_neobert.checkpoint.train_state import TrainState
from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig, Settings, TrainingConfig
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.errors import ConfigError
from megatron_neobert.state import MetricSums, StepResult
from megatron_neobert.training.metrics import Monitor, Trackers, interval_lines, start_wandb

NAN = float("nan")
TOKENS, PAIRS = 50, 20**2 + 30**2  # of a step with two documents


def result(loss: float = 2.0, *, masked: int = 10, skip_reason: str | None = None) -> StepResult:
    """Return a step of 50 tokens in which half of the predictions are right."""
    sums = MetricSums(loss * masked, masked, masked / 2, TOKENS, PAIRS)
    return StepResult(sums, grad_norm=1.0, skip_reason=skip_reason)


def start(tmp_path: Path) -> Monitor:
    settings = Settings(training=TrainingConfig(train_iters=10), checkpoint=CheckpointConfig(save=str(tmp_path)))
    return Monitor(settings, iteration=0, vocab_size=1000, device=torch.device("cpu"))


def recorded(monitor: Monitor) -> list[dict]:
    path = Path(monitor.settings.checkpoint.save) / "metrics.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines()) if "start" not in line]


def state_of(iteration: int, *, skipped: int = 0, in_a_row: int = 0) -> TrainState:
    return TrainState(corpus_sha256="", iteration=iteration, skipped_iterations=skipped, skipped_in_a_row=in_a_row)


def test_tokens_of_a_skipped_step_count_and_its_loss_does_not(tmp_path):
    monitor = start(tmp_path)
    monitor.add(result(2.0), state_of(1))
    monitor.add(result(NAN, skip_reason="loss nan"), state_of(2, skipped=1, in_a_row=1))
    monitor.add(result(4.0, masked=30), state_of(3, skipped=1))
    monitor.close_interval(state_of(3, skipped=1), lr=1e-4, grad_norm=1.0)
    line = recorded(monitor)[-1]
    assert line["loss"] == (10 * 2.0 + 30 * 4.0) / (10 + 30)
    assert line["masked_accuracy"] == 0.5
    assert line["fill"] == 3 * TOKENS / (3 * monitor.settings.tokens_per_iteration)
    assert line["skipped_iterations"] == 1


def test_operations_are_those_of_the_tokens_that_were_predicted(tmp_path, monkeypatch):
    """Each token more that is predicted costs 3 x 2 x vocabulary x width, in skipped iterations, too."""
    clock = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    operations = []
    for masked, skip_reason in ((10, None), (11, None), (11, "gradient norm nan")):
        monitor = start(tmp_path / str(len(operations)))
        monitor.add(result(masked=masked, skip_reason=skip_reason), state_of(1))
        monitor.started_seconds = next(clock)
        monitor.close_interval(state_of(1), lr=1e-4, grad_norm=1.0)
        operations.append(recorded(monitor)[-1]["tflops_per_rank"] * 1e12)
    assert operations[1] - operations[0] == pytest.approx(6 * 1000 * 768)
    assert operations[2] == operations[1]


def test_interval_with_skipped_steps_only_has_no_loss(tmp_path, capsys):
    monitor = start(tmp_path)
    monitor.add(result(NAN, skip_reason="loss nan, gradient norm nan"), state_of(1, skipped=1, in_a_row=1))
    capsys.readouterr()
    monitor.close_interval(state_of(1, skipped=1, in_a_row=1), lr=1e-4, grad_norm=NAN)
    assert capsys.readouterr().out.startswith("iteration 1/10 | loss - | accuracy - | grad norm -\n  lr 1.0e-04 | ")
    assert not {"loss", "masked_accuracy", "grad_norm"} & recorded(monitor)[-1].keys()


def test_bits_per_byte_are_the_bits_of_the_predicted_tokens_over_their_bytes(tmp_path):
    monitor, sums = start(tmp_path), {"a": MetricSums(20, 10, 5, TOKENS), "b": MetricSums(90, 30, 5, TOKENS)}
    monitor.report_validation(state_of(1), sums, {"a": 4.0, "b": 5.0})
    monitor.report_validation(state_of(2), sums, {"a": 4.0, "b": None})
    known, unknown = recorded(monitor)
    assert known["validation_bits_per_byte_a"] == pytest.approx(2 / math.log(2) / 4)
    assert known["validation_bits_per_byte"] == pytest.approx((20 + 90) / math.log(2) / (10 * 4 + 30 * 5))
    assert {name for name in unknown if "bits" in name} == {"validation_bits_per_byte_a"}


CPU = {
    "loss": 2.41312,
    "masked_accuracy": 0.5123,
    "lr": 6e-4,
    "grad_norm": 0.8312,
    "tokens_per_second": 9_342.0,
    "tflops_per_rank": 0.0149,
    "memory_gib": 0.84,
    "data_wait": 0.0042,
    "eta_seconds": 6 * 86_400 + 3 * 3_600 + 59 * 60,
}
GPUS = {"tokens_per_second": 1.2e6, "tflops_per_rank": 247.25, "mfu": 0.25, "memory_gib": 41.23}
GPUS |= {"slowest_rank": 213, "slowest_rank_lead": 0.124, "compute_seconds": 1.2345}


def test_lines_of_an_interval_on_cpu_and_on_gpus(monkeypatch):
    group = {"RANK": "0", "WORLD_SIZE": "256", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert interval_lines("iteration 120000/1000000", CPU) == (
        "iteration 120000/1000000 | loss 2.4131 | accuracy 51.23 % | grad norm 0.831\n"
        "  lr 6.0e-04 | 9.34 k tok/s | 14.9 GFLOP/s | 0.8 GiB | wait 0 % | ETA 6 d 3 h"
    )
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    assert interval_lines("iteration 120000/1000000", CPU | GPUS).endswith(
        "| 1.20 M tok/s | MFU 25.0 % | 41 GiB | wait 0 % | ETA 6 d 3 h\n"
        "  slowest rank 213, 12 % above the median of 1.23 s per step"
    )


# --- trackers: TensorBoard, the record, and a W&B that does not start


def trackers_of(save: Path, log: Callable[[str], object] = print) -> Trackers:
    return Trackers(Settings(checkpoint=CheckpointConfig(save=str(save))), iteration=0, log=log)


def test_tensorboard_has_the_finite_values_of_the_record_in_groups(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = trackers_of(tmp_path)
    values = {"loss": 2.5, "lr": 0.125, "mfu": 0.5, "validation_loss_web": 4.0, "grad_norm": math.inf}
    trackers.record(7, values, cursor=Cursor())
    trackers.close(failed=False)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    tags = {"train/loss": 2.5, "train/lr": 0.125, "machine/mfu": 0.5, "validation/loss_web": 4.0}
    assert found == {tag: [(7, value)] for tag, value in tags.items()}
    first, line = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first.items() >= {"iteration": 0, "start": True}.items()
    assert line.items() >= {"loss": 2.5, "iteration": 7}.items() and "grad_norm" not in line


def test_a_link_in_place_of_the_record_is_reported_once_and_not_written_to(tmp_path):
    logged: list[str] = []
    record, thesis = tmp_path / "metrics.jsonl", tmp_path / "thesis.tex"
    thesis.write_text("my thesis")
    record.symlink_to(thesis)
    trackers = trackers_of(tmp_path, logged.append)
    for iteration in (1, 2):
        trackers.record(iteration, {"loss": 1.0}, cursor=Cursor())
    trackers.close(failed=False)
    (warning,) = logged
    assert warning.startswith(f"warning: {record} cannot be written ({record} is a link, a pipe")
    assert thesis.read_text() == "my thesis"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_full_disk_is_reported_once_and_training_continues(tmp_path):
    logged: list[str] = []
    trackers = trackers_of(tmp_path, logged.append)
    trackers.tensorboard._get_file_writer().event_writer._async_writer._worker._flush_secs = 0
    with largest_file(2000):
        for iteration in range(1, 60):
            trackers.record(iteration, {"loss": 1.0, "lr": 2.0}, cursor=Cursor())
            time.sleep(0.01)
        trackers.close(failed=False)
    record, tensorboard = sorted(logged)
    warning = f"warning: {tmp_path}/%s cannot be written (File too large); training continues without it"
    assert (record, tensorboard) == (warning % "metrics.jsonl", warning % "tensorboard")
    assert (tmp_path / "metrics.jsonl").stat().st_size == 2000


def test_wrong_variable_of_wandb_is_reported_with_the_reason(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    settings = Settings(checkpoint=CheckpointConfig(save=str(tmp_path)), logging=LoggingConfig(wandb_project="books"))
    with pytest.raises(ConfigError, match=r"did not start \(.* mode Input .*'nonsense'.*correct the setting"):
        start_wandb(settings)
