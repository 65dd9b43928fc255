"""NeoBERTConfig: published settings, refused settings, saved files; and initialization."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_neobert import build_config

from megatron_neobert.huggingface.modeling_neobert import (
    AUTO_MAP,
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
)

PUBLISHED_PARAMETERS = 245_136_954


def test_default_model_has_the_published_names_shapes_and_dtypes(shared_data: Path):
    lines = (shared_data / "fixtures" / "reference_state_dict_keys.txt").read_text(encoding="utf-8").splitlines()
    with torch.device("meta"):
        model = NeoBERTForMaskedLM(NeoBERTConfig())
    weights = [f"{name}\t{tuple(weight.shape)}\t{weight.dtype}" for name, weight in model.state_dict().items()]
    assert sorted(weights) == sorted(lines)
    assert sum(weight.numel() for weight in model.parameters()) == PUBLISHED_PARAMETERS


def test_published_config_is_read_and_saved_with_the_names_of_this_code(shared_data: Path, tmp_path: Path):
    published = json.loads((shared_data / "fixtures" / "hf_config.json").read_text(encoding="utf-8"))
    config = NeoBERTConfig.from_dict({**published, "max_length": 2048})
    assert config.max_position_embeddings == 2048
    assert (config.hidden_size, config.norm_eps, config.rope_theta, config.dim_head) == (768, 1e-5, 10_000.0, 64)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert saved["max_position_embeddings"] == 2048
    assert "max_length" not in saved
    assert saved["auto_map"] == AUTO_MAP, "the published file is not in the saved folder"


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"hidden_size": 36}, ["dim_head 9", "even"]),
        ({"dim_head": 16}, ["dim_head 16", "hidden_size 32"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "rope_theta"]),
        ({"rope_parameters": {"rope_theta": 5e3}, "rope_theta": 1e4}, ["rope_theta 5000", "rope_theta 10000"]),
    ],
)
def test_invalid_settings_are_refused_with_their_values(settings: dict[str, Any], fragments: list[str]):
    with pytest.raises(ValueError) as caught:
        build_config(**settings)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rotary_base_is_read_from_the_keys_of_transformers_5(name: str):
    assert build_config(**{name: {"rope_type": "default", "rope_theta": 5000.0}}).rope_theta == 5000.0
    assert build_config(**{name: {"type": "default"}}).rope_theta == 10_000.0
    assert build_config(**{name: None}).rope_theta == 10_000.0


def test_weights_are_initialized_like_the_published_model():
    """Uniform, including the row of the padding token; biases 0, norms 1; new heads from a normal distribution."""
    torch.manual_seed(0)
    changes = {"embedding_init_range": 0.05, "decoder_init_range": 0.03, "classifier_init_range": 0.2}
    language_model = NeoBERTForMaskedLM(build_config(**changes))
    classifier = NeoBERTForSequenceClassification(build_config(**changes))
    embedding = language_model.model.encoder.weight
    assert 0.049 < embedding.abs().max() <= 0.05
    assert embedding[0].abs().max() > 0.01
    for name in ("model.transformer_encoder.0.qkv", "model.transformer_encoder.1.ffn.w3", "decoder"):
        assert 0.029 < language_model.get_submodule(name).weight.abs().max() <= 0.03, name
    assert language_model.decoder.bias.abs().max() == 0
    assert torch.equal(language_model.model.layer_norm.weight, torch.ones(32))
    assert 0.18 < classifier.dense.weight.std() < 0.22
