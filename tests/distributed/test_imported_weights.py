"""Training continues from converted weights, in any layout and without losing a bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import read_metrics, train_on_ranks
from torch import Tensor

from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.export import export
from checkpoint_conversion.imports import import_folder
from checkpoint_conversion.mapping import split_halves
from megatron_neobert.checkpoint.contents import StoredTensors
from megatron_neobert.checkpoint.folder import latest_checkpoint
from megatron_neobert.config.schema import Settings

STOP = 3


@pytest.fixture
def imported(settings: Any, tmp_path: Path) -> str:
    """Weights of a run of three iterations, exported to Hugging Face and imported again. The run is in `first`."""
    run = settings("first", training={"exit_interval": STOP})
    train_on_ranks(run)
    export(read_checkpoint(Path(run.checkpoint.save)), tmp_path / "model")
    import_folder(tmp_path / "model", tmp_path / "imported")
    return str(tmp_path / "imported")


def continued(run: Settings, source: str, **training: Any) -> Settings:
    run = run.with_section("checkpoint", load=run.checkpoint.save, continue_from=source)
    return run.with_section("training", **training)


def stored_tensors(save: str, prefix: str) -> dict[str, Tensor]:
    folder = latest_checkpoint(Path(save))
    stored = StoredTensors(folder)
    return {name.removeprefix(prefix): stored.read_whole(name) for name in stored.shapes if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        (2, {"tensor_model_parallel_size": 2}),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"use_distributed_optimizer": False}, marks=pytest.mark.slow),
    ],
    ids=["one rank", "TP 2", "PP 2", "DP 2 with a whole optimizer"],
)
def test_converted_weights_give_the_loss_of_the_original_weights(
    settings: Any, imported: str, tmp_path: Path, world_size: int, parallel: dict[str, Any]
):
    # With another seed, the data start again, as they do with converted weights. So both runs read the same batch.
    whole = continued(settings("whole"), str(tmp_path / "first"), exit_interval=STOP + 1, seed=1)
    train_on_ranks(whole)
    run = continued(settings("second", parallel=parallel), imported, exit_interval=2, seed=1)
    train_on_ranks(run, world_size=world_size)
    expected, loss = read_metrics(whole.checkpoint.save)[STOP + 1], read_metrics(run.checkpoint.save)[1]
    assert loss == pytest.approx(expected, rel=1e-6)  # other layouts add in another order
    assert world_size > 1 or loss == expected
    initial_loss = read_metrics(tmp_path / "first")[1]
    assert abs(initial_loss - expected) > 1e-3 * expected, "initial weights must give another loss"


@pytest.mark.parametrize("distributed_optimizer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bfloat16_run_keeps_the_converted_weights_in_float32(settings: Any, imported: str, distributed_optimizer: bool):
    run = settings("second", parallel={"use_distributed_optimizer": distributed_optimizer}, optimizer={"lr": 0.0})
    run = continued(run.with_section("optimizer", min_lr=0.0), imported, exit_interval=1, bf16=True)
    train_on_ranks(run)
    expected = split_halves(read_checkpoint(Path(imported)).tensors)
    stored = stored_tensors(run.checkpoint.save, "optimizer.state.param.")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].view_as(tensor), tensor) for name, tensor in expected.items())
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in expected.values()), (
        "rounding must change the weights"
    )


def test_converted_weights_in_load_are_refused_with_the_right_flag(settings: Any, imported: str):
    run = settings("second").with_section("checkpoint", load=imported)
    with pytest.raises(Exception, match=r"has no optimizer state .* give it as --continue-from"):
        train_on_ranks(run)
