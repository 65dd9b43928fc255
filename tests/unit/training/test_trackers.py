"""Values in TensorBoard and the record, a full disk, and the error of a W&B that does not start."""

import importlib.util
import json
import math
import resource
import time

import pytest

from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig, Settings
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.errors import ConfigError
from megatron_neobert.training.trackers import Trackers, start_wandb


def test_tensorboard_has_the_finite_values_of_the_record_in_groups(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(Settings(checkpoint=CheckpointConfig(save=str(tmp_path))), iteration=0, log=print)
    values = {
        "loss": 2.5,
        "lr": 0.125,
        "mfu": 0.5,
        "memory_gib": 3.0,
        "validation_loss_web": 4.0,
        "grad_norm": math.inf,
    }
    trackers.record(7, values, cursor=Cursor())
    trackers.close(failed=False)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    tags = {
        "train/loss": 2.5,
        "train/lr": 0.125,
        "machine/mfu": 0.5,
        "machine/memory_gib": 3.0,
        "validation/loss_web": 4.0,
    }
    assert found == {tag: [(7, value)] for tag, value in tags.items()}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()).items() >= {"loss": 2.5, "iteration": 7}.items()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's thread
def test_full_disk_is_reported_once_and_training_continues(tmp_path):
    logged: list[str] = []
    settings = Settings(checkpoint=CheckpointConfig(save=str(tmp_path)))
    trackers = Trackers(settings, iteration=0, log=logged.append)
    trackers.tensorboard._get_file_writer().event_writer._async_writer._worker._flush_secs = 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # writing beyond raises EFBIG
    try:
        for iteration in range(1, 60):
            trackers.record(iteration, {"loss": 1.0, "lr": 2.0}, cursor=Cursor())
            time.sleep(0.01)
        trackers.close(failed=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    record, tensorboard = sorted(logged)
    assert (
        record == f"warning: {tmp_path}/metrics.jsonl cannot be written (File too large); training continues without it"
    )
    assert tensorboard.startswith(f"warning: {tmp_path}/tensorboard cannot be written (File too large)")
    assert (tmp_path / "metrics.jsonl").stat().st_size == 2000


needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def start(save: object) -> None:
    settings = Settings(checkpoint=CheckpointConfig(save=str(save)), logging=LoggingConfig(wandb_project="books"))
    start_wandb(settings)


@needs_wandb
def test_wrong_variable_of_wandb_is_reported_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match=r"did not start \(.* mode Input .*'nonsense'.*correct the setting"):
        start(tmp_path)
