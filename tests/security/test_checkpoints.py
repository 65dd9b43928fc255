"""Hostile checkpoints: training, conversion and comparison end with code 78 and one sentence, and nothing in them runs.

A checkpoint is safetensors, JSON and YAML. Each control shows that the file is dangerous where it is trusted.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hostile import Canary, Checkpoint
from processes import Ended, run_command
from safetensors.torch import load_file, save_file

Reader = Callable[[], Ended]
TENSORS = "rank_00000.safetensors"


@pytest.fixture(params=["training", "convert", "verify"])
def read(request: pytest.FixtureRequest, training: list[str], checkpoint: Checkpoint, tmp_path: Path) -> Reader:
    """Runs a command that reads the checkpoint; each is a door of its own."""
    save = checkpoint.save
    words = {
        "training": ["megatron_neobert.pretrain", *training, "--save", save, "--load", save],
        "convert": ["checkpoint_conversion.convert", "megatron-to-hf", "--load", save, "--output", tmp_path / "hf"],
        "verify": ["megatron_neobert.__main__", "verify", save, save],
    }[request.param]
    return lambda: run_command(*map(str, words))


def test_untouched_checkpoint_is_read(read: Reader):
    assert read().code == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places: places["output_layer.bias"].update(saved_offsets=[10**15]), "do not add up to its shape"),
        (lambda places: places["output_layer.bias"].update(saved_offsets=[-1]), "begins at (-1,)"),
        (lambda places: places.pop("output_layer.bias"), "cannot be read (KeyError"),
    ],
    ids=["petabytes", "negative", "nowhere"],
)
def test_part_that_lies_about_its_place_is_refused_before_memory_is_taken(
    read: Reader, checkpoint: Checkpoint, change: Callable[[dict[str, dict[str, list[int]]]], object], message: str
):
    tensors = load_file(checkpoint.folder / TENSORS)
    places = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    change(places)
    save_file(tensors, checkpoint.folder / TENSORS, metadata={"DCP_SHARDING_INFO": json.dumps(places)})
    checkpoint.seal()
    result = read()
    assert result.refused(78), result.output
    assert message in result.output


def test_extra_state_of_transformer_engine_is_not_unpickled(read: Reader, checkpoint: Checkpoint, canary: Canary):
    """megatron.core 0.16.1 calls pickle.loads on such bytes when Transformer Engine's modules load them."""
    state = torch.frombuffer(bytearray(pickle.dumps(canary)), dtype=torch.uint8)
    name = "decoder.layers.0.self_attention.linear_qkv._extra_state"
    places = json.dumps({name: {"saved_offsets": [0]}})
    save_file({name: state}, checkpoint.folder / "rank_00001.safetensors", metadata={"DCP_SHARDING_INFO": places})
    checkpoint.seal()
    result = read()
    assert result.refused(78), result.output
    assert not canary.has_run
    pickle.loads(state.numpy().tobytes())
    assert canary.has_run
