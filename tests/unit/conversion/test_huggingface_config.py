"""Reading config.json: settings, refused values, and required keys."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import PUBLISHED

from checkpoint_conversion.config_json import FolderConfig, read_model_config
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import ConversionError

PATH = Path("model") / "config.json"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 13,
    "max_position_embeddings": 64,
}
LLAMA_LIKE: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 48,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "eurobert": {**LLAMA_LIKE, "model_type": "eurobert", "mlp_bias": True},
    "llama": {**LLAMA_LIKE, "model_type": "llama", "is_causal": False},
    "neobert": {**SIZES, "model_type": "neobert", "intermediate_size": 72, "norm_eps": 1e-5, "rope_theta": 5000.0},
}


def read(layout: str, **changes: Any) -> FolderConfig:
    """Read the config of a layout with changed values; `...` removes a key."""
    changed = CONFIGS[layout] | changes
    return read_model_config({key: value for key, value in changed.items() if value is not ...}, PATH)


def refusal(layout: str, **changes: Any) -> str:
    """Return the message of the error for a changed config."""
    with pytest.raises(ConversionError) as caught:
        read(layout, **changes)
    message = str(caught.value)
    assert message.startswith(f"{PATH}: ")
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_published_config_gives_the_published_model():
    published = json.loads((PUBLISHED / "config.json").read_text())
    config = read_model_config(published, PATH)
    assert config.model == ModelConfig(ffn_hidden_size=2048)  # the other values are the defaults of training
    assert (config.layout, config.vocab_size, config.tied) == ("neobert", 30_522, False)


@pytest.mark.parametrize(("stated", "width"), [(3072, 2048), (72, 48), (100, 72), (4, 8)])
def test_neobert_width_is_two_thirds_rounded_up_to_a_multiple_of_8(stated: int, width: int):
    assert read("neobert", intermediate_size=stated).model.ffn_hidden_size == width


def test_missing_rotary_base_is_the_published_one_in_the_neobert_layout_only():
    assert read("neobert", rope_theta=...).model.rotary_base == 10_000
    assert "rope_theta is missing" in refusal("eurobert", rope_parameters=...)
    assert "rope_theta is missing" in refusal("llama", rope_parameters={"rope_type": "default"})


def test_rotary_base_is_read_from_the_keys_of_all_versions_of_transformers():
    assert read("eurobert", rope_parameters=..., rope_theta=250_000, rope_scaling=None).model.rotary_base == 250_000
    assert read("neobert", rope_theta=..., rope_parameters={"rope_theta": 160_000.0}).model.rotary_base == 160_000
    assert read("llama", rope_parameters=..., rope_theta=500, rope_scaling={"type": "default"}).model.rotary_base == 500


def test_longest_input_has_two_names_in_the_neobert_layout():
    assert read("neobert", max_position_embeddings=..., max_length=512).model.max_position_embeddings == 512
    assert read("neobert", max_length=64).model.max_position_embeddings == 64
    assert "max_length is 512; max_position_embeddings is 64" in refusal("neobert", max_length=512)
    assert read("eurobert", max_length=20).model.max_position_embeddings == 64  # a setting of text generation


REQUIRED = [
    *((layout, key) for layout in CONFIGS for key in SIZES),
    *((layout, "intermediate_size") for layout in CONFIGS),
    ("eurobert", "rms_norm_eps"),
    ("llama", "rms_norm_eps"),
    ("neobert", "norm_eps"),
    ("eurobert", "hidden_act"),
    ("llama", "hidden_act"),
    ("llama", "is_causal"),
]


@pytest.mark.parametrize(("layout", "key"), REQUIRED)
@pytest.mark.parametrize("value", [..., None], ids=["absent", "null"])
def test_keys_that_affect_the_function_are_required(layout: str, key: str, value: object):
    assert re.search(rf": {key} is (missing|None); ", refusal(layout, **{key: value}))


UNFIT = [
    ("eurobert", {"num_key_value_heads": 2}, "num_key_value_heads is 2; NeoBERT has one key head for each of its 4"),
    ("neobert", {"dim_head": 4}, "dim_head is 4; NeoBERT's head width is hidden_size / num_attention_heads = 8"),
    ("eurobert", {"attention_bias": True}, "attention_bias is True; NeoBERT's attention has no biases"),
    ("llama", {"is_causal": True}, "is_causal is True; NeoBERT's attention is bidirectional"),
    ("neobert", {"rope": False}, "rope is False; positions must be rotary"),
    ("eurobert", {"quantization_config": {"bits": 4}}, "quantization_config is a dict of length 1; quantized"),
    ("eurobert", {"num_attention_heads": 5}, "num_attention_heads is 5; hidden_size 32 must give each head the same"),
    ("eurobert", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is a dict of length 1; its rope_type is"),
    ("llama", {"rope_parameters": {"rope_theta": 9, "factor": 2.0}}, "its factor is 2.0, but NeoBERT's rotary"),
    ("llama", {"rope_parameters": [5000.0]}, "rope_parameters is a list of length 1; an object with"),
    ("eurobert", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; NeoBERT rotates every channel"),
    ("eurobert", {"rope_theta": 9000}, "rope_theta is 9000; there are two bases, 9000 and 5000"),
    ("neobert", {"rope_theta": 0.5}, "rope_theta is 0.5; a whole number from 2 to 2,147,483,647 is needed"),
    ("neobert", {"model_type": "bert"}, "model_type is 'bert'; only eurobert, neobert, llama have"),
]


@pytest.mark.parametrize(("layout", "changes", "reason"), UNFIT)
def test_value_that_neobert_cannot_have_is_refused_with_the_reason(layout: str, changes: dict[str, Any], reason: str):
    assert reason in refusal(layout, **changes)
