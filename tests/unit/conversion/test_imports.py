"""Conversion from Hugging Face folders to checkpoints and back, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import PUBLISHED, call
from safetensors.torch import load_file, save_file
from saved_model import WORDS, build_reference, change_config
from torch import Tensor

from checkpoint_conversion import imports
from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.export import export
from checkpoint_conversion.imports import import_folder
from megatron_neobert.errors import ConversionError

LAYOUTS = ("eurobert", "neobert")


def all_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all weight files."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= {f"{path.name}: {name}": tensor for name, tensor in load_file(path).items()}
    return weights


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_and_folder_are_unchanged_after_export_and_import(saved, exported, tmp_path, layout, dtype):
    first, second = exported(layout=layout, dtype=dtype)[0], tmp_path / "again"
    import_folder(first, tmp_path / "imported")
    before, after = read_checkpoint(saved.save), read_checkpoint(tmp_path / "imported")
    stored = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in before.tensors.items()}
    assert_equal(after.tensors, stored)
    assert after.settings.model == before.settings.model
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    assert after.iteration == 0

    export(after, second, layout=layout, dtype=dtype)
    assert_equal(all_weights(second), all_weights(first))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


@pytest.fixture
def published(copy_of: Any) -> Path:
    """A folder like the one that chandar-lab published: the same names of weights, a config without a rotary base."""
    folder = copy_of("neobert")
    for name in ("conversion_report.json", "README.md", "modeling_neobert.py"):
        (folder / name).unlink()
    shutil.copyfile(PUBLISHED / "config.json", folder / "config.json")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "max_length": 64}
    change_config(folder, **sizes, intermediate_size=72, vocab_size=len(WORDS))
    return folder


def pad_vocabulary(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("model.encoder.weight", "decoder.weight", "decoder.bias"):
        rows = torch.full((3, *weights[name].shape[1:]), value)
        weights[name] = torch.cat((weights[name][: len(WORDS)], rows))
    save_file(weights, folder / "model.safetensors")
    change_config(folder, vocab_size=len(WORDS) + 3)


def test_published_folder_has_the_rotary_base_of_its_code_and_loses_padding_of_zeros(published: Path, tmp_path: Path):
    pad_vocabulary(published, 0.0)
    imported, checks = import_folder(published, tmp_path / "imported")
    assert imported.model.rotary_base == 10_000
    assert any("no rotary base; it is 10,000" in note for note in imported.notes)
    assert "dropped 3 rows of zeros from the vocabulary, for which the tokenizer has no ids" in imported.notes
    assert checks["padded"].relative < 1e-5 > checks["packed"].relative
    reference = read_checkpoint(tmp_path / "imported").build_reference(torch.float32)
    assert_equal(reference.state_dict(), build_reference().state_dict())
    pad_vocabulary(published, 0.5)
    with pytest.raises(ConversionError, match=r"has 13 ids and the embedding 16 rows, but .* is not zero"):
        import_folder(published, tmp_path / "again")


def test_import_with_a_wrong_mapping_is_refused(exported, tmp_path, monkeypatch):
    to_internal = imports.to_internal

    def swap_gate_and_up(*arguments: object) -> dict[str, Tensor]:
        tensors = to_internal(*arguments)  # type: ignore[arg-type]
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        return tensors | {name: tensors[name].roll(len(tensors[name]) // 2, 0)}

    monkeypatch.setattr(imports, "to_internal", swap_gate_and_up)
    with pytest.raises(ConversionError, match=r"the written checkpoint differs from its source: padded, its logits"):
        import_folder(exported()[0], tmp_path / "imported")
    assert not list(tmp_path.glob("imported*"))


def test_command_prints_the_flags_to_continue_with_and_warns_about_another_mask_id(model, tmp_path):
    change_config(model, mask_token_id=5)
    code, output, errors = call("convert", "hf-to-megatron", "--load", model, "--output", tmp_path / "imported")
    assert code == 0 and errors.count("\n") == 1
    assert "[MASK] has id 4 in the tokenizer, but mask_token_id is 5 in config.json" in errors
    assert f"--continue-from {tmp_path / 'imported'}" in output
    assert "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48" in output
    assert "--rotary-base 5000" in output
    assert "100.0%" in output
