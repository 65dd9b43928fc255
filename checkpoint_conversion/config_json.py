"""Write and read config.json of the two layouts.

A written file states every convention that the function depends on (rotary base and style, epsilon, widths), also where
the value is a default. A file that is read must state the conventions too; values that NeoBERT's layers cannot compute
are refused with the reason.

Source: transformers >= 5.3 models/eurobert; chandar-lab/NeoBERT on the Hub, config.json and model.py.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoint_conversion.mapping import TABLES, ModelShape
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import ConversionError
from megatron_neobert.huggingface.checks import quote

_INIT_RANGE = 0.02  # of heads added by fine-tuning; the published model initializes them from N(0, 0.02)
_LARGEST = 2**31 - 1  # the product of two sizes then fits into 64 bits
# The published code has no setting for the base: rotary.py has this default, and no caller passes another value.
_NEOBERT_ROTARY_BASE = 10_000

# Keys, their accepted values, and the reason. None among the values means that the key may be absent.
_Demands = tuple[tuple[str, tuple[object, ...], str], ...]
_ALL_LAYOUTS: _Demands = (
    ("quantization_config", (None,), "quantized weights cannot be trained further, use the original model"),
    ("compression_config", (None,), "compressed weights cannot be trained further, use the original model"),
    ("partial_rotary_factor", (None, 1, 1.0), "NeoBERT rotates every channel of a head, which is 1.0"),
    ("tie_word_embeddings", (None, False, True), "true or false is needed"),
)
_DEMANDS: dict[str, _Demands] = {
    "eurobert": (
        ("hidden_act", ("silu", "swish"), "NeoBERT's feed-forward is SwiGLU, which gates with SiLU"),
        ("attention_bias", (None, False), "NeoBERT's attention has no biases"),
        ("mlp_bias", (None, False, True), "true or false is needed"),
    ),
    "neobert": (
        ("hidden_act", (None, "swiglu", "SwiGLU"), "the feed-forward must be SwiGLU"),
        ("rms_norm", (None, True), "the norms must be RMSNorm"),
        ("rope", (None, True), "positions must be rotary"),
        ("ngpt", (None, False), "NeoBERT does not have the normalised layers of nGPT"),
    ),
}


class FolderConfig(NamedTuple):
    """Settings of a folder's model, and facts that are needed to read its weights."""

    layout: str  # a name in mapping.TABLES
    model: ModelConfig
    vocab_size: int
    tied: bool  # the decoder's weight is the embedding
    has_biases: bool  # mlp_bias: feed-forward layers and EuroBERT's decoder have biases
    notes: tuple[str, ...]  # assumptions, for the user


# --- writing


def build_config(
    layout: str, shape: ModelShape, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return the content of config.json for a layout in mapping.TABLES. `neobert` uses the published NeoBERT's keys.

    Raises ConversionError if the layout is `neobert` and the feed-forward width is not a multiple of 8.
    """
    model, is_neobert, dtype_name = shape.model, layout == "neobert", str(dtype).removeprefix("torch.")
    if is_neobert and model.ffn_width % 8:
        raise ConversionError(
            f"--ffn-hidden-size {model.ffn_width} is not a multiple of 8, which the neobert layout requires; use "
            "--format eurobert."
        )
    width, theta = model.hidden_size // model.num_attention_heads, float(model.rotary_base)
    neobert = {
        "architectures": ["NeoBERTForMaskedLM"],
        "dim_head": width,
        "intermediate_size": model.ffn_width * 3 // 2,  # the model's width is two thirds of it
        # The published class reads max_length only, 1,024 without it. transformers 5 treats max_length as a setting of
        # text generation, and saves max_position_embeddings only.
        "max_length": model.max_position_embeddings,
        "norm_eps": model.norm_epsilon,
        "rope_theta": theta,
        "embedding_init_range": model.init_method_range,
        "decoder_init_range": model.init_method_range,
        "classifier_init_range": _INIT_RANGE,
        "cls_token_id": tokenizer.cls_id,
        "sep_token_id": tokenizer.sep_id,
        "torch_dtype": dtype_name,
    }
    eurobert = {
        "architectures": ["EuroBertForMaskedLM"],
        "num_key_value_heads": model.num_attention_heads,
        "head_dim": width,
        "intermediate_size": model.ffn_width,
        "hidden_act": "silu",
        "initializer_range": _INIT_RANGE,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": True,  # without it EuroBERT's decoder has no bias
        "classifier_pooling": "bos",
        "dtype": dtype_name,
    }
    return {
        "model_type": layout,
        "vocab_size": shape.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
        "mask_token_id": tokenizer.mask_id,
        **(neobert if is_neobert else eurobert),
    }


# --- reading


class _Fields(NamedTuple):
    """Checked access to the values of a config.json. The methods raise ConversionError for a wrong value."""

    config: dict[str, Any]
    path: Path

    def size(self, key: str) -> int:
        """Return a value that must be a whole number from 1 to _LARGEST."""
        value = self.config.get(key)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise self.wrong(key, f"a whole number from 1 to {_LARGEST:,} is needed")
        return value

    def number(self, key: str) -> float:
        """Return a value that must be a number from 0 to _LARGEST."""
        value: Any = self.config.get(key)
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
            raise self.wrong(key, f"a number from 0 to {_LARGEST:,} is needed")
        return float(value)

    def demand(self, key: str, accepted: tuple[object, ...], reason: str) -> None:
        """Raise ConversionError if the value of `key` is not in `accepted`. A missing key has the value None."""
        value = self.config.get(key)
        if not any(type(value) is type(candidate) and value == candidate for candidate in accepted):  # True is not 1
            raise self.wrong(key, reason)

    def wrong(self, key: str, rule: str) -> ConversionError:
        """Return a ConversionError whose message states the value of `key` and the `rule` for it."""
        value = self.config.get(key)
        state = "missing" if value is None else quote(value)
        return ConversionError(f"{self.path}: {key} is {state}; {rule}.")


def read_model_config(config: dict[str, Any], path: Path) -> FolderConfig:
    """Return the model settings in the content of a config.json. `path` is the file's path, for messages.

    Raises ConversionError if a value is missing, of the wrong type, or describes layers that NeoBERT does not have.
    """
    fields, layout = _Fields(config, path), config.get("model_type")
    if layout not in tuple(TABLES):  # a tuple, because a value from a file may not be hashable
        raise fields.wrong("model_type", f"only {', '.join(TABLES)} have layers like NeoBERT's")
    for key, accepted, reason in (*_ALL_LAYOUTS, *_DEMANDS[layout]):
        fields.demand(key, accepted, reason)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    if hidden % heads or (hidden // heads) % 2:
        rule = f"hidden_size {hidden} must give each head the same, even number of channels"
        raise fields.wrong("num_attention_heads", rule)
    for key in ("head_dim", "dim_head"):
        rule = f"NeoBERT's head width is hidden_size / num_attention_heads = {hidden // heads}"
        fields.demand(key, (None, hidden // heads), rule)
    fields.demand("num_key_value_heads", (None, heads), f"NeoBERT has one key head for each of its {heads} query heads")
    is_neobert, notes = layout == "neobert", []
    ffn_width, positions = fields.size("intermediate_size"), "max_position_embeddings"
    if is_neobert:
        # SwiGLU's width is two thirds of intermediate_size, rounded up to a multiple of 8: model.py EncoderBlock.
        ffn_width = 8 * -(-(2 * ffn_width // 3) // 8)
        # The published name of the longest input is max_length, which transformers 5 no longer saves.
        if config.get("max_length") is not None:
            if config.get(positions) is not None:
                rule = f"max_position_embeddings is {quote(config[positions])}; remove the wrong one"
                fields.demand("max_length", (config[positions],), rule)
            positions = "max_length"
    rotary_base = read_rotary_base(fields)
    if rotary_base is None and is_neobert:
        rotary_base = _NEOBERT_ROTARY_BASE
        notes.append(f"config.json has no rotary base; it is {rotary_base:,}, the constant in NeoBERT's published code")
    # Only the neobert layout records the initialization, which has no effect on existing weights.
    has_init_range = config.get("embedding_init_range") is not None
    model = ModelConfig(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn_width,
        max_position_embeddings=fields.size(positions),
        # Without a base, `size` raises the error for the missing key.
        rotary_base=fields.size("rope_theta") if rotary_base is None else rotary_base,
        norm_epsilon=fields.number("norm_eps" if is_neobert else "rms_norm_eps"),
        init_method_range=fields.number("embedding_init_range") if has_init_range else ModelConfig().init_method_range,
    )
    return FolderConfig(
        layout=layout,
        model=model,
        vocab_size=fields.size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings")),
        has_biases=bool(config.get("mlp_bias")),
        notes=tuple(notes),
    )


def read_rotary_base(fields: _Fields) -> int | None:
    """Return the base of the rotary angles, or None if no key states it. Reads the keys of all transformers versions.

    Raise ConversionError if a base is not a whole number >= 2, two bases differ, or the angles are scaled or partial.
    """
    bases = [fields.config.get("rope_theta")]
    plain = {"rope_type": (None, "default"), "type": (None, "default"), "partial_rotary_factor": (None, 1, 1.0)}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = fields.config.get(key) or {}
        if not isinstance(parameters, dict):
            raise fields.wrong(key, "an object with rope_type and rope_theta is needed")
        for name, value in parameters.items():
            if name != "rope_theta" and value not in plain.get(name, ()):
                rule = f"its {name} is {quote(value)}, but NeoBERT's rotary angles depend on rope_theta only"
                raise fields.wrong(key, rule)
        bases.append(parameters.get("rope_theta"))
    stated = [base for base in bases if base is not None]
    for base in stated:
        if type(base) not in (int, float) or not 2 <= base <= _LARGEST or base != int(base):
            raise fields.wrong("rope_theta", f"a whole number from 2 to {_LARGEST:,} is needed, not {quote(base)}")
        if base != stated[0]:
            raise fields.wrong("rope_theta", f"there are two bases, {stated[0]:g} and {base:g}")
    return int(stated[0]) if stated else None
