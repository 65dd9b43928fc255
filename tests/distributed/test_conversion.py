"""Checkpoints of training runs, on any number of ranks, are read as the model that was trained."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run_on_ranks
from ranks import train_on_ranks
from tolerances import MEGATRON_LOGITS

from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.mapping import join_halves
from megatron_neobert.checkpoint.contents import StoredTensors
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.config.schema import Settings
from megatron_neobert.training.setup import build_run, join

LENGTHS = (9, 1, 30, 4)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
TOKENS = torch.randint(280, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def save_loud_weights(settings: Settings, *, world_size: int, logits: Path | None = None) -> None:
    """Save iteration 7 of a run with enlarged initial weights, and the logits of the model in `logits`."""
    run_on_ranks(_save_on_rank, settings, logits, world_size=world_size)


def _save_on_rank(settings: Settings, logits: Path | None) -> None:
    run = build_run(settings, *join(settings))
    model = run.unwrapped_model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if parameter.dim() == 1 else 12)
        model.output_layer.bias.copy_(model.output_layer.weight.sum(1))  # zero for the padding of the vocabulary
        if logits is not None:
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
    save_loud_weights(run, world_size=1, logits=tmp_path / "logits.pt")
    reference = read_checkpoint(Path(run.checkpoint.save)).build_reference(torch.float32)
    with torch.no_grad():
        logits = reference.forward_packed(TOKENS, STARTS)
    expected = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert expected.abs().max() > 3, "logits too small to show an error"
    assert (logits - expected).abs().max() / expected.abs().max() <= MEGATRON_LOGITS.gate


def test_weights_do_not_depend_on_the_layout_that_saved_them(settings):
    layouts = {"alone": (1, {}), "data": (2, {}), "tensor": (2, {"tensor_model_parallel_size": 2})}
    checkpoints = {}
    for name, (world_size, parallel) in layouts.items():
        run = settings(name, parallel=parallel)
        save_loud_weights(run, world_size=world_size)
        checkpoints[name] = read_checkpoint(Path(run.checkpoint.save))
    published = {
        name: checkpoint.build_reference(torch.float32).state_dict() for name, checkpoint in checkpoints.items()
    }
    padded = {name: checkpoint.shape.padded_vocab_size for name, checkpoint in checkpoints.items()}
    assert padded["tensor"] > padded["alone"], "the layouts must pad the vocabulary differently"
    for name in ("data", "tensor"):
        assert published[name].keys() == published["alone"].keys()
        for tensor in published["alone"]:
            assert torch.equal(published[name][tensor], published["alone"][tensor]), (name, tensor)


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [(1, {}), (2, {"tensor_model_parallel_size": 2}), (2, {"use_distributed_optimizer": False})],
    ids=["one rank", "TP 2", "whole optimizer"],
)
def test_bfloat16_run_is_read_as_its_fp32_main_weights(settings, world_size, parallel):
    run = settings("run", parallel=parallel, training={"bf16": True})
    train_on_ranks(run, world_size=world_size)
    checkpoint = read_checkpoint(Path(run.checkpoint.save))
    rounded = model_tensors(checkpoint.folder)
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), rounded[name]), f"{name} is not the weight that training used"
    assert any(not torch.equal(tensor, rounded[name].float()) for name, tensor in checkpoint.tensors.items())


def model_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in a checkpoint, as stored."""
    stored = StoredTensors(folder)
    tensors = {name: stored.read_whole(name) for name in stored.shapes if not name.startswith("optimizer.")}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    return join_halves(tensors)
