"""From a Hugging Face folder to a checkpoint and back: every bit survives, and nothing is read as what it is not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import call
from safetensors.torch import load_file, save_file
from saved_model import WORDS, SavedModel, build_reference, change_config
from torch import Tensor

from checkpoint_conversion import imports
from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.export import export
from checkpoint_conversion.imports import import_folder
from megatron_neobert.errors import ConversionError

LAYOUTS = ("eurobert", "neobert", "llama")
Export = Callable[..., Path]


@pytest.fixture
def exported(saved: SavedModel, tmp_path: Path) -> Export:
    """Exports the saved checkpoint, or another one."""

    def build(layout: str, *, name: str = "model", save: Path = saved.save, dtype: str = "float32") -> Path:
        checkpoint, output = read_checkpoint(save), tmp_path / name
        export(checkpoint, output, layout=layout, dtype=dtype)
        return output

    return build


def all_weights(folder: Path) -> dict[str, Tensor]:
    """Of every file of a folder, its mlm_head included."""
    weights = {}
    for path in sorted(folder.rglob("*.safetensors")):
        weights |= {f"{path.relative_to(folder)}: {name}": tensor for name, tensor in load_file(path).items()}
    return weights


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_survives_the_way_to_hugging_face_and_back_bit_for_bit(saved, exported, tmp_path, layout, dtype):
    """So does a folder the way to a checkpoint and back."""
    first = exported(layout, dtype=dtype)
    import_folder(first, tmp_path / "imported")
    before, after = read_checkpoint(saved.save), read_checkpoint(tmp_path / "imported")
    stored = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in before.tensors.items()}
    assert_same_bits(after.tensors, stored)
    assert after.settings.model == before.settings.model
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    assert after.iteration == 0

    second = exported(layout, name="again", save=tmp_path / "imported", dtype=dtype)
    assert_same_bits(all_weights(second), all_weights(first))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


@pytest.fixture
def published(exported: Export, tmp_path: Path) -> Path:
    """A folder as chandar-lab published it: weights under the same names, a config without a rotary base."""
    folder = shutil.copytree(exported("neobert"), tmp_path / "published")
    for name in ("conversion_report.json", "README.md", "modeling_neobert.py"):
        (folder / name).unlink()
    config = {
        "architectures": ["NeoBERTLMHead"],
        "auto_map": {"AutoModelForMaskedLM": "model.NeoBERTLMHead"},
        "classifier_init_range": 0.02,
        "decoder_init_range": 0.02,
        "dim_head": 8,
        "embedding_init_range": 0.02,
        "hidden_size": 32,
        "intermediate_size": 72,
        "kwargs": {"pretrained_model_name_or_path": "google-bert/bert-base-uncased", "trust_remote_code": True},
        "max_length": 64,
        "model_type": "neobert",
        "norm_eps": 1e-5,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "trust_remote_code": True,
        "vocab_size": len(WORDS),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def test_published_weights_are_read_with_their_own_rotary_base_and_epsilon(published: Path, tmp_path: Path):
    imported, checks = import_folder(published, tmp_path / "imported")
    assert imported.model.rotary_base == 10_000, "the base that the published code fixes"
    assert any("rotary base is 10,000" in note for note in imported.notes)
    assert imported.model.max_position_embeddings == 64
    assert imported.model.norm_epsilon == 1e-5
    assert checks["padded"].relative < 1e-5 > checks["packed"].relative
    found = read_checkpoint(tmp_path / "imported").build_reference(torch.float32)
    assert_same_bits(found.state_dict(), build_reference().state_dict())
    assert found.model.config.rotary_base == 10_000


def pad_vocabulary(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("model.encoder.weight", "decoder.weight", "decoder.bias"):
        rows = torch.full((3, *weights[name].shape[1:]), value)
        weights[name] = torch.cat((weights[name][: len(WORDS)], rows))
    save_file(weights, folder / "model.safetensors")
    change_config(folder, vocab_size=len(WORDS) + 3)


def test_padding_of_a_vocabulary_is_dropped_if_it_is_zero(published: Path, tmp_path: Path):
    pad_vocabulary(published, 0.0)
    imported, checks = import_folder(published, tmp_path / "imported")
    assert "dropped 3 rows of zeros, for which the tokenizer has no ids, from the vocabulary" in imported.notes
    assert checks["padded"].relative < 1e-5
    found = read_checkpoint(tmp_path / "imported").build_reference(torch.float32)
    assert_same_bits(found.state_dict(), build_reference().state_dict())
    pad_vocabulary(published, 0.5)
    with pytest.raises(ConversionError, match=r"has 13 ids and the embedding 16 rows, and .* is not zero"):
        import_folder(published, tmp_path / "again")


def test_a_wrong_mapping_is_refused_and_leaves_nothing(exported, tmp_path, monkeypatch):
    right = imports.to_internal

    def exchange_gate_and_up(*arguments: object) -> dict[str, Tensor]:
        tensors = right(*arguments)  # type: ignore[arg-type]
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        return tensors | {name: tensors[name].roll(len(tensors[name]) // 2, 0)}

    monkeypatch.setattr(imports, "to_internal", exchange_gate_and_up)
    with pytest.raises(ConversionError, match=r"the written checkpoint, padded: its logits differ"):
        import_folder(exported("eurobert"), tmp_path / "imported")
    assert not list(tmp_path.glob("imported*"))


def test_the_command_says_what_to_continue_with(exported, tmp_path):
    model = exported("llama")
    change_config(model, mask_token_id=5)
    arguments = ("--load", model, "--output", tmp_path / "imported")
    code, shown, complaints = call("convert", "hf-to-megatron", *arguments)
    assert code == 0 and complaints.count("\n") == 1
    assert "the tokenizer's [MASK] is id 4, and mask_token_id of config.json is 5" in complaints
    assert f"--continue-from {tmp_path / 'imported'}" in shown
    assert "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48" in shown
    assert "--rotary-base 5000" in shown
    assert "100.0%" in shown
