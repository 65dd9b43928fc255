"""What a config.json holds of a model, in the words of our settings.

The file is read as data: no class of transformers and no code of the folder takes part. What decides the function
of the model (norm epsilon, rotary base, activation, widths) is read and never assumed, and what our layers
cannot compute is refused with the reason. Layouts: EuroBERT, NeoBERT, and a Llama that looks both ways.

Source: transformers 5 models/eurobert, models/llama; chandar-lab/NeoBERT on the Hub, config.json and model.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint_conversion.hf_folder import quote
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import ConversionError

LAYOUTS = ("eurobert", "neobert", "llama")

_LARGEST = 2**31 - 1
# The published code has no setting for it; rotary.py there defaults to this base and nobody passes another.
_NEOBERT_ROTARY_BASE = 10_000
_DROPOUTS = ("dropout", "attention_dropout")


class FolderConfig(NamedTuple):
    """A model that our settings can express, and what else its weights are to be read by."""

    layout: str  # one of LAYOUTS
    model: ModelConfig
    vocab_size: int
    tied: bool  # the decoder's weight is the embedding
    has_biases: bool  # in the feed-forward and, with it, in EuroBERT's decoder
    mask_token_id: object  # as it stands there
    notes: tuple[str, ...]


class Demand(NamedTuple):
    """A key with the only values that our layers can follow; None among them lets the key be absent."""

    key: str
    accepted: tuple[object, ...]
    reason: str


_LLAMA_LIKE = (
    Demand("hidden_act", ("silu", "swish"), "NeoBERT's feed-forward is SwiGLU, which gates with SiLU"),
    Demand("attention_bias", (None, False), "NeoBERT's attention has no biases to hold them"),
)
_DEMANDS = {
    "eurobert": (*_LLAMA_LIKE, Demand("mlp_bias", (None, False, True), "it decides whether there are biases")),
    "llama": (
        *_LLAMA_LIKE,
        Demand("mlp_bias", (None, False), "NeoBERT's feed-forward has no biases to hold them"),
        Demand("is_causal", (False,), "NeoBERT's tokens see those after them; a Llama's do so where this is false"),
        Demand("use_bidirectional_attention", (None, True), "some readers would compute causal attention"),
    ),
    "neobert": (
        Demand("hidden_act", (None, "swiglu", "SwiGLU"), "the feed-forward must be SwiGLU"),
        Demand("rms_norm", (None, True), "the norms must be RMSNorm"),
        Demand("rope", (None, True), "positions must be rotary angles"),
        Demand("ngpt", (None, False), "the normalised layers of nGPT compute something else"),
    ),
}


@dataclass(frozen=True)
class _Fields:
    """The values of a config.json, each checked as it is read."""

    config: dict[str, Any]
    path: Path

    def size(self, key: str) -> int:
        value = self._given(key)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise self.wrong(key, value, f"a whole number from 1 to {_LARGEST:,} is needed")
        return value

    def optional_size(self, key: str) -> int | None:
        return None if self.config.get(key) is None else self.size(key)

    def number(self, key: str) -> float:
        value = self._given(key)
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
            raise self.wrong(key, value, f"a number from 0 to {_LARGEST:,} is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if value is not None and type(value) is not bool:
            raise self.wrong(key, value, "true or false is needed")
        return bool(value)

    def demand(self, demand: Demand) -> None:
        value = self.config.get(demand.key)
        if not any(type(value) is type(one) and value == one for one in demand.accepted):
            raise self.wrong(demand.key, value, demand.reason)

    def wrong(self, key: str, value: object, rule: str) -> ConversionError:
        found = f"{key} is {quote(value)}" if key in self.config else f"{key} is missing"
        return ConversionError(f"{self.path}: {found}; {rule}.")

    def _given(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise ConversionError(
                f"{self.path}: {key} is missing; it decides what the model computes, so nothing is assumed for it. Add "
                "the value that the model was trained with."
            )
        return self.config[key]


def read_model_config(config: dict[str, Any], path: Path) -> FolderConfig:
    """The settings of a model out of its config.json.

    Args:
        path: Of the file, for messages.

    Raises:
        ConversionError: A value is missing, of the wrong kind, or asks for something that NeoBERT's layers are not.
    """
    fields = _Fields(config, path)
    layout = _read_layout(fields)
    _refuse_quantization(fields)
    for demand in _DEMANDS[layout]:
        fields.demand(demand)
    is_neobert = layout == "neobert"
    model = ModelConfig(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=fields.size("hidden_size"),
        num_attention_heads=_read_heads(fields),
        ffn_hidden_size=_read_neobert_width(fields) if is_neobert else fields.size("intermediate_size"),
        max_position_embeddings=_read_positions(fields, is_neobert=is_neobert),
        rotary_base=_read_rotary_base(fields, is_neobert=is_neobert),
        norm_epsilon=fields.number("norm_eps" if is_neobert else "rms_norm_eps"),
        init_method_range=_read_init_range(fields),
    )
    return FolderConfig(
        layout=layout,
        model=model,
        vocab_size=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        has_biases=fields.flag("mlp_bias"),
        mask_token_id=fields.config.get("mask_token_id"),
        notes=(*_describe_dropout(fields), *_describe_rotary_base(fields, is_neobert=is_neobert)),
    )


def _read_layout(fields: _Fields) -> str:
    layout = fields.config.get("model_type")
    if layout not in LAYOUTS:
        raise fields.wrong("model_type", layout, f"only folders of {', '.join(LAYOUTS)} hold layers like NeoBERT's")
    return str(layout)


def _refuse_quantization(fields: _Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        if fields.config.get(key) is not None:
            raise fields.wrong(
                key, fields.config[key], "weights that are stored quantised cannot be trained further, use the original"
            )


def _read_heads(fields: _Fields) -> int:
    """The number of heads, all of them alike in width and each with its own keys and values."""
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    if hidden % heads or (hidden // heads) % 2:
        raise fields.wrong(
            "num_attention_heads", heads, f"hidden_size {hidden} must give each head the same, even number of channels"
        )
    for key in ("head_dim", "dim_head"):
        if (width := fields.optional_size(key)) not in (None, hidden // heads):
            raise fields.wrong(key, width, f"NeoBERT's heads are hidden_size / num_attention_heads = {hidden // heads}")
    if (groups := fields.optional_size("num_key_value_heads")) not in (None, heads):
        raise fields.wrong(
            "num_key_value_heads", groups, f"NeoBERT's {heads} heads have keys and values of their own, not shared ones"
        )
    return heads


def _read_neobert_width(fields: _Fields) -> int:
    """The real width of SwiGLU; the file has 3/2 of it, before rounding up to a multiple of 8.

    Source: chandar-lab/NeoBERT on the Hub, model.py EncoderBlock.
    """
    return 8 * -(-(2 * fields.size("intermediate_size") // 3) // 8)


def _read_positions(fields: _Fields, *, is_neobert: bool) -> int:
    """The longest row; the published NeoBERT calls it max_length, which transformers 5 no longer saves."""
    legacy = fields.optional_size("max_length") if is_neobert else None
    if legacy is None:
        return fields.size("max_position_embeddings")
    positions = fields.optional_size("max_position_embeddings")
    if positions not in (None, legacy):
        raise fields.wrong("max_length", legacy, f"max_position_embeddings says {positions}; remove the wrong one")
    return legacy


def _read_rotary_base(fields: _Fields, *, is_neobert: bool) -> int:
    """The base of unscaled rotary angles over whole heads, wherever a version of transformers writes it."""
    bases = {}
    if fields.config.get("rope_theta") is not None:
        bases["rope_theta"] = fields.number("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        parameters = fields.config.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise fields.wrong(key, parameters, "an object with rope_type and rope_theta is needed")
        inner = _Fields(parameters, fields.path)
        _refuse_scaling(inner, key)
        if parameters.get("rope_theta") is not None:
            bases[f"{key}.rope_theta"] = inner.number("rope_theta")
    _refuse_partial_rotation(fields)
    if len(set(bases.values())) > 1:
        found = " and ".join(f"{key} {value:g}" for key, value in bases.items())
        raise ConversionError(f"{fields.path}: {found} contradict each other; remove the wrong one.")
    if not bases and is_neobert:
        return _NEOBERT_ROTARY_BASE
    if not bases:
        return int(fields.number("rope_theta"))  # missing: refused
    key, base = bases.popitem()
    if base != int(base) or not 2 <= base <= _LARGEST:
        raise ConversionError(f"{fields.path}: {key} is {base:g}; a whole number from 2 to {_LARGEST:,} is needed.")
    return int(base)


def _describe_rotary_base(fields: _Fields, *, is_neobert: bool) -> list[str]:
    """The one convention that a published folder leaves to its code."""
    if not is_neobert or any(fields.config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")):
        return []
    return [f"the rotary base is {_NEOBERT_ROTARY_BASE:,}, which NeoBERT's published code fixes; config.json has none"]


def _refuse_scaling(parameters: _Fields, key: str) -> None:
    for name in ("rope_type", "type"):  # the older spelling
        kind = parameters.config.get(name)
        if kind not in (None, "default"):
            raise ConversionError(
                f"{parameters.path}: {key}.{name} is {quote(kind)}; NeoBERT's rotary angles are not scaled, which is "
                "'default'."
            )
    _refuse_partial_rotation(parameters)
    known = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    if unknown := [name for name in parameters.config if name not in known]:
        raise ConversionError(
            f"{parameters.path}: {key} has {quote(unknown[0])}; NeoBERT's rotary angles depend on rope_theta alone. "
            "Only a model without it can be read."
        )


def _refuse_partial_rotation(fields: _Fields) -> None:
    factor = fields.config.get("partial_rotary_factor")
    if factor is not None and factor != 1:
        raise fields.wrong("partial_rotary_factor", factor, "NeoBERT rotates every channel of a head, which is 1.0")


def _read_init_range(fields: _Fields) -> float:
    """What the weights started from: recorded by NeoBERT's own layout alone, without effect on weights that exist."""
    if fields.config.get("embedding_init_range") is None:
        return ModelConfig().init_method_range
    return fields.number("embedding_init_range")


def _describe_dropout(fields: _Fields) -> list[str]:
    """Dropout is no part of what the weights compute; NeoBERT is trained without."""
    rates = {key: fields.number(key) for key in _DROPOUTS if fields.config.get(key) is not None}
    return [f"{key} {rate:g} of config.json is not kept: training here has none" for key, rate in rates.items() if rate]
