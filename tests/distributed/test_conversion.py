"""Training continues from converted weights without losing a bit, and checkpoints are read as they were trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from ranks import read_metrics, train_on_ranks
from test_layouts import TP2
from tolerances import MEGATRON_LOGITS
from torch import Tensor

from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.export import export
from checkpoint_conversion.imports import import_folder
from checkpoint_conversion.mapping import join_halves, split_halves
from megatron_neobert.checkpoint.contents import StoredTensors
from megatron_neobert.checkpoint.folder import latest_checkpoint
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.config.schema import Settings
from megatron_neobert.training.setup import build_run, join

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
    run = run.with_section("checkpoint", continue_from=source)
    return run.with_section("training", **training)


def stored_tensors(save: str, prefix: str) -> dict[str, Tensor]:
    folder = latest_checkpoint(Path(save))
    stored = StoredTensors(folder)
    return {name.removeprefix(prefix): stored.read_whole(name) for name in stored.shapes if name.startswith(prefix)}


@pytest.mark.parametrize("parallel", [TP2, pytest.param({}, marks=pytest.mark.slow)])
def test_converted_weights_give_the_loss_of_the_original_weights(
    settings: Any, imported: str, tmp_path: Path, parallel: dict[str, Any]
):
    # With another seed, the data start again, as they do with converted weights. So both runs read the same batch.
    whole = continued(settings("whole"), str(tmp_path / "first"), exit_interval=STOP + 1, seed=1)
    train_on_ranks(whole)
    run = continued(settings("second", parallel=parallel), imported, exit_interval=2, seed=1)
    train_on_ranks(run, world_size=2)
    expected, loss = read_metrics(whole.checkpoint.save)[STOP + 1], read_metrics(run.checkpoint.save)[1]
    assert loss == pytest.approx(expected, rel=1e-6)  # other layouts add in another order
    initial_loss = read_metrics(tmp_path / "first")[1]
    assert abs(initial_loss - expected) > 1e-3 * expected, "initial weights must give another loss"


def test_bfloat16_run_keeps_the_converted_weights_in_float32(settings: Any, imported: str):
    run = continued(settings("second", optimizer={"lr": 0.0, "min_lr": 0.0}), imported, exit_interval=1, bf16=True)
    train_on_ranks(run)
    expected = split_halves(read_checkpoint(Path(imported)).tensors)
    stored = stored_tensors(run.checkpoint.save, "optimizer.state.param.")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name].view_as(tensor), tensor) for name, tensor in expected.items())
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in expected.values()), "the control"


def test_converted_weights_in_load_are_refused_with_the_right_flag(settings: Any, imported: str):
    run = settings("second").with_section("checkpoint", load=imported)
    with pytest.raises(Exception, match=r"has no optimizer state .* give it as --continue-from"):
        train_on_ranks(run)


# --- reading: checkpoints of any number of ranks are read as the model that was trained


LENGTHS = (9, 1, 30, 4)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
TOKENS = torch.randint(280, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def save_large_weights(settings: Settings, logits: Path) -> None:
    """Save iteration 7 of a run with enlarged initial weights, and the logits of the model in `logits`."""
    run = build_run(settings, *join(settings))
    model = run.unwrapped_model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if parameter.dim() == 1 else 12)
        model.output_layer.bias.copy_(model.output_layer.weight.sum(1))  # zero for the padding of the vocabulary
        computed = model(TOKENS, STARTS, max(LENGTHS), torch.arange(len(TOKENS)))
        torch.save(computed[:, : run.tokenizer.vocab_size].clone(), logits)
    run.model.zero_grad_buffer()
    run.optimizer.prepare_grads()
    # With a learning rate of 0, because Megatron does not save an optimizer that has never stepped.
    run.optimizer.step_with_ready_grads()
    run.state = replace(run.state, iteration=7)
    Saver(run, log=print).save()


def test_reference_with_saved_weights_gives_megatron_s_logits(settings, tmp_path):
    run = settings("run")
    run_on_ranks(save_large_weights, run, tmp_path / "logits.pt", world_size=1)
    reference = read_checkpoint(Path(run.checkpoint.save)).build_reference(torch.float32)
    with torch.no_grad():
        logits = reference.forward_packed(TOKENS, STARTS)
    expected = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert expected.abs().max() > 3, "logits too small to show an error"
    assert (logits - expected).abs().max() / expected.abs().max() <= MEGATRON_LOGITS.gate


def test_bfloat16_run_is_read_as_its_fp32_main_weights(settings):
    run = settings("run", training={"bf16": True})
    train_on_ranks(run)
    checkpoint = read_checkpoint(Path(run.checkpoint.save))
    stored = StoredTensors(checkpoint.folder)
    weights = [name for name in stored.shapes if not name.startswith("optimizer.")]
    main = join_halves({name: stored.read_whole(stored.main_name(name)) for name in weights})
    assert checkpoint.tensors.keys() == main.keys()
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, main[name].view_as(tensor)), name
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in checkpoint.tensors.values())
