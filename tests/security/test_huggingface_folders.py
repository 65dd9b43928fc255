"""Hostile Hugging Face folders: verify.py runs nothing that they bring along and reads nothing outside them."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hostile import Canary, call
from processes import Ended, run_command
from transformers import AutoModelForMaskedLM, EuroBertConfig, EuroBertForMaskedLM

TINY = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 3,
}


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("huggingface") / "model"
    EuroBertForMaskedLM(EuroBertConfig(**TINY)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def verify(folder: Path) -> Ended:
    return call("checkpoint_conversion.verify", folder, folder)


def add_code(folder: Path, canary: Canary, config_class: str) -> None:
    (folder / "own_code.py").write_text(
        f"{canary.source}from transformers import EuroBertConfig, EuroBertForMaskedLM\n"
        f"class OwnConfig(EuroBertConfig): model_type = '{config_class}'\n"
        "class Own(EuroBertForMaskedLM): config_class = OwnConfig\n"
    )
    change_config(
        folder,
        model_type=config_class,
        auto_map={"AutoConfig": "own_code.OwnConfig", "AutoModelForMaskedLM": "own_code.Own"},
        trust_remote_code=True,
    )


def test_untouched_folder_is_equal_to_itself(folder: Path):
    assert run_command("checkpoint_conversion.verify", folder, folder).code == 0


def test_model_with_its_own_code_is_refused(folder: Path, canary: Canary):
    add_code(folder, canary, "own_model")
    result = verify(folder)
    assert result.refused(78), result.output
    assert not canary.has_run
    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert canary.has_run


def test_code_beside_a_model_that_transformers_has_is_left_alone(folder: Path, canary: Canary):
    add_code(folder, canary, "eurobert")
    assert verify(folder).code == 0
    assert not canary.has_run


@pytest.mark.parametrize(
    "outside", ["../outside.safetensors", "/etc/outside.safetensors", "sub/w.safetensors", "w.bin"]
)
def test_weights_outside_the_folder_are_refused(folder: Path, outside: str):
    tensors = folder / "model.safetensors"
    names = list(AutoModelForMaskedLM.from_pretrained(folder).state_dict())
    tensors.rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, outside)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = verify(folder)
    assert result.refused(78), result.output
    assert f"shall be read from {outside!r}, which is no safetensors file of the folder" in result.output


def test_transformers_would_read_weights_outside_the_folder(folder: Path):
    """The control of the test above."""
    names = list(AutoModelForMaskedLM.from_pretrained(folder).state_dict())
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert AutoModelForMaskedLM.from_pretrained(folder).config.vocab_size == TINY["vocab_size"]


def test_pickled_weights_are_refused(folder: Path, canary: Canary):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.bias": canary}, folder / "pytorch_model.bin")
    result = verify(folder)
    assert result.refused(78), result.output
    assert not canary.has_run
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert canary.has_run


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_attention_that_would_be_fetched_is_refused(folder: Path, key: str):
    change_config(folder, **{key: "somebody/kernel"})
    result = verify(folder)
    assert result.refused(78), result.output
    assert f"{key} is 'somebody/kernel', which transformers may fetch code for" in result.output


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"\xff", b"3", b'{"model_type": 7}', b'{"model_type": "eurobert", "hidden_size": "x"}', b"{}"],
    ids=["nested", "not UTF-8", "number", "type is a number", "width is a word", "empty"],
)
def test_config_that_is_nonsense_is_refused(folder: Path, content: bytes):
    (folder / "config.json").write_bytes(content)
    result = verify(folder)
    assert result.refused(78), result.output


def test_adapter_that_belongs_to_another_model_is_refused(folder: Path):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": os.fspath(folder.parent)}))
    result = verify(folder)
    assert result.refused(78), result.output
    assert "adapter_config.json: an adapter changes a model that lies elsewhere" in result.output


def test_pickle_in_the_place_of_weights_is_refused(folder: Path, canary: Canary):
    (folder / "model.safetensors").write_bytes(pickle.dumps(canary))
    result = verify(folder)
    assert result.refused(78), result.output
    assert not canary.has_run
