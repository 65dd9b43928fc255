"""What the kinds of folder say: the published names and fields, and every convention written out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saved_model import MODEL, SHAPE, WORDS
from transformers import AutoConfig

from checkpoint_conversion.hf_config import LAYOUTS
from checkpoint_conversion.hf_writer import FolderSpec, build_config
from checkpoint_conversion.mapping import NEOBERT, published_shapes
from checkpoint_conversion.megatron_io import model_shape
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConversionError
from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig

# Of the published config.json: loading options that leaked into it, and versions.
NOT_OF_THE_MODEL = {
    "architectures",
    "auto_map",
    "kwargs",
    "pretrained_model_name_or_path",
    "transformers_version",
    "trust_remote_code",
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    return load_tokenizer(tmp_path / "vocab.txt")


def test_neobert_folder_has_the_published_keys_and_shapes(shared_data: Path):
    lines = (shared_data / "fixtures" / "reference_state_dict_keys.txt").read_text().splitlines()
    expected = {name: shape for name, shape, dtype in (line.split("\t") for line in lines)}
    shape = model_shape(Settings(), vocab_size=30_522)
    found = {name: str(sizes) for name, sizes in published_shapes(NEOBERT, shape).items()}
    assert found == expected
    assert len(found) == 172


def test_neobert_config_has_the_published_fields(shared_data: Path):
    published = json.loads((shared_data / "fixtures" / "hf_config.json").read_text())
    bert = load_tokenizer(shared_data / "tokenizers" / "bert-base-uncased" / "vocab.txt")
    shape = model_shape(Settings(), vocab_size=bert.vocab_size)
    config = build_config("neobert", FolderSpec(ModelConfig(), shape, bert))
    expected = {name: value for name, value in published.items() if name not in NOT_OF_THE_MODEL}
    assert {name: config.get(name) for name in expected} == expected
    assert config["max_position_embeddings"] == published["max_length"]
    assert config["auto_map"].keys() >= published["auto_map"].keys()
    assert not {"trust_remote_code", "kwargs"} & config.keys()


def test_neobert_config_is_saved_again_by_the_class_of_the_folder(tokenizer: Tokenizer, tmp_path: Path):
    """transformers 5 refuses to save a config with max_length, which the published class needs."""
    written = build_config("neobert", FolderSpec(MODEL, SHAPE, tokenizer))
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = NeoBERTConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert written["max_length"] == config.max_position_embeddings == 64
    assert NeoBERTConfig.from_pretrained(tmp_path).max_position_embeddings == 64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_convention_of_the_function_is_written_out(layout: str, tokenizer: Tokenizer):
    model = replace(MODEL, rotary_base=7_000, norm_epsilon=3e-6)
    config = build_config(layout, FolderSpec(model, SHAPE, tokenizer, torch.bfloat16))
    said = json.dumps(config)
    for value in ("7000.0", "3e-06", "bfloat16", '"vocab_size": 13', '"tie_word_embeddings": false'):
        assert value in said
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    assert {name: config[name] for name in special} == special


@pytest.mark.parametrize("layout", ["eurobert", "llama"])
def test_transformers_reads_the_config_as_it_was_meant(layout: str, tokenizer: Tokenizer, tmp_path: Path):
    written = build_config(layout, FolderSpec(MODEL, SHAPE, tokenizer))
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.rms_norm_eps == 1e-5
    assert config.head_dim == 8
    assert getattr(config, "is_causal", False) is False


def test_llama_config_asks_every_reader_for_attention_in_both_directions(tokenizer: Tokenizer):
    config = build_config("llama", FolderSpec(MODEL, SHAPE, tokenizer))
    assert (config["is_causal"], config["use_bidirectional_attention"]) == (False, True)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0


def test_a_width_that_the_published_fields_cannot_say_is_refused(tokenizer: Tokenizer):
    shape = replace(SHAPE, ffn_hidden_size=44)
    with pytest.raises(ConversionError, match="--ffn-hidden-size 44 is not a multiple of 8"):
        build_config("neobert", FolderSpec(MODEL, shape, tokenizer))
