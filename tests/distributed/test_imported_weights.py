"""Training goes on from converted weights, in any layout, with not a bit of them lost."""

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
    """Weights of a run of three iterations, to Hugging Face and back; the run lies beside."""
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
def test_converted_weights_give_the_loss_of_the_run_that_they_come_from(
    settings: Any, imported: str, tmp_path: Path, world_size: int, parallel: dict[str, Any]
):
    # Of another seed the data begin anew, as they do with converted weights: both runs read the same rows first.
    whole = continued(settings("whole"), str(tmp_path / "first"), exit_interval=STOP + 1, seed=1)
    train_on_ranks(whole)
    run = continued(settings("second", parallel=parallel), imported, exit_interval=2, seed=1)
    train_on_ranks(run, world_size=world_size)
    expected, found = read_metrics(whole.checkpoint.save)[STOP + 1], read_metrics(run.checkpoint.save)
    assert found[1] == pytest.approx(expected, rel=1e-6)  # equal on one rank; other layouts add in another order
    assert world_size > 1 or found[1] == expected
    fresh = read_metrics(tmp_path / "first")[1]
    assert abs(fresh - expected) > 1e-3 * expected, "fresh weights would do as well"


@pytest.mark.parametrize("distributed_optimizer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_bfloat16_run_updates_the_converted_weights_and_not_their_rounding(
    settings: Any, imported: str, distributed_optimizer: bool
):
    run = settings("second", parallel={"use_distributed_optimizer": distributed_optimizer}, optimizer={"lr": 0.0})
    run = continued(run.with_section("optimizer", min_lr=0.0), imported, exit_interval=1, bf16=True)
    train_on_ranks(run)
    expected = split_halves(read_checkpoint(Path(imported)).tensors)
    prefix = f"optimizer.state.{'param' if distributed_optimizer else 'fp32_param'}."
    found = stored_tensors(run.checkpoint.save, prefix)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view_as(tensor), tensor) for name, tensor in expected.items())
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in expected.values()), "nothing to lose"


def test_converted_weights_as_the_runs_own_folder_are_refused_with_the_flag_to_use(settings: Any, imported: str):
    run = settings("second").with_section("checkpoint", load=imported)
    with pytest.raises(Exception, match=r"has no optimizer state .* give it as --continue-from"):
        train_on_ranks(run)
