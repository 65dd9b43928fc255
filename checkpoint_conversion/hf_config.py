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


# Keys with the only values that our layers can follow, and why; None among them lets the key be absent.
_Demands = tuple[tuple[str, tuple[object, ...], str], ...]
_LLAMA_LIKE: _Demands = (
    ("hidden_act", ("silu", "swish"), "NeoBERT's feed-forward is SwiGLU, which gates with SiLU"),
    ("attention_bias", (None, False), "NeoBERT's attention has no biases to hold them"),
)
_DEMANDS: dict[str, _Demands] = {
    "eurobert": (*_LLAMA_LIKE, ("mlp_bias", (None, False, True), "it decides whether there are biases")),
    "llama": (
        *_LLAMA_LIKE,
        ("mlp_bias", (None, False), "NeoBERT's feed-forward has no biases to hold them"),
        ("is_causal", (False,), "NeoBERT's tokens see those after them; a Llama's do so where this is false"),
        ("use_bidirectional_attention", (None, True), "some readers would compute causal attention"),
    ),
    "neobert": (
        ("hidden_act", (None, "swiglu", "SwiGLU"), "the feed-forward must be SwiGLU"),
        ("rms_norm", (None, True), "the norms must be RMSNorm"),
        ("rope", (None, True), "positions must be rotary angles"),
        ("ngpt", (None, False), "the normalised layers of nGPT compute something else"),
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
    layout = config.get("model_type")
    if layout not in LAYOUTS:
        raise fields.wrong("model_type", layout, f"only folders of {', '.join(LAYOUTS)} hold layers like NeoBERT's")
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            rule = "weights that are stored quantised cannot be trained further, use the original"
            raise fields.wrong(key, config[key], rule)
    for key, accepted, reason in _DEMANDS[layout]:
        if not any(type(config.get(key)) is type(one) and config.get(key) == one for one in accepted):
            raise fields.wrong(key, config.get(key), reason)
    is_neobert, notes = layout == "neobert", []
    rotary_base = _read_rotary_base(fields)
    if rotary_base is None and is_neobert:
        rotary_base = _NEOBERT_ROTARY_BASE
        notes.append(f"the rotary base is {rotary_base:,}, which NeoBERT's published code fixes; config.json has none")
    for key in _DROPOUTS:  # no part of what the weights compute
        if config.get(key) is not None and (rate := fields.number(key)):
            notes.append(f"{key} {rate:g} of config.json is not kept: training here has none")
    # What the weights started from: recorded by NeoBERT's own layout alone, without effect on weights that exist.
    has_start = config.get("embedding_init_range") is not None
    model = ModelConfig(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=fields.size("hidden_size"),
        num_attention_heads=_read_heads(fields),
        ffn_hidden_size=_read_neobert_width(fields) if is_neobert else fields.size("intermediate_size"),
        max_position_embeddings=_read_neobert_positions(fields)
        if is_neobert
        else fields.size("max_position_embeddings"),
        rotary_base=fields.size("rope_theta") if rotary_base is None else rotary_base,  # missing: refused
        norm_epsilon=fields.number("norm_eps" if is_neobert else "rms_norm_eps"),
        init_method_range=fields.number("embedding_init_range") if has_start else ModelConfig().init_method_range,
    )
    return FolderConfig(
        layout=layout,
        model=model,
        vocab_size=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        has_biases=fields.flag("mlp_bias"),
        mask_token_id=config.get("mask_token_id"),
        notes=tuple(notes),
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


def _read_neobert_positions(fields: _Fields) -> int:
    """The longest row; the published NeoBERT calls it max_length, which transformers 5 no longer saves."""
    legacy = fields.optional_size("max_length")
    if legacy is None:
        return fields.size("max_position_embeddings")
    positions = fields.optional_size("max_position_embeddings")
    if positions not in (None, legacy):
        raise fields.wrong("max_length", legacy, f"max_position_embeddings is {positions}; remove the wrong one")
    return legacy


def _read_rotary_base(fields: _Fields) -> int | None:
    """The base of unscaled rotary angles over whole heads, from any place where a version of transformers writes it."""
    places = {"": fields}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = fields.config.get(key)
        if isinstance(parameters, dict):
            places[f"{key}."] = _Fields(parameters, fields.path)
            _refuse_scaling(places[f"{key}."], key)
        elif parameters is not None:
            raise fields.wrong(key, parameters, "an object with rope_type and rope_theta is needed")
    for place in places.values():
        factor = place.config.get("partial_rotary_factor")
        if factor is not None and factor != 1:
            raise place.wrong("partial_rotary_factor", factor, "NeoBERT rotates every channel of a head, which is 1.0")
    given = {prefix: place for prefix, place in places.items() if place.config.get("rope_theta") is not None}
    bases = {f"{prefix}rope_theta": place.number("rope_theta") for prefix, place in given.items()}
    if len(set(bases.values())) > 1:
        found = " and ".join(f"{key} {value:g}" for key, value in bases.items())
        raise ConversionError(f"{fields.path}: {found} contradict each other; remove the wrong one.")
    for key, base in bases.items():
        if base != int(base) or not 2 <= base <= _LARGEST:
            raise ConversionError(f"{fields.path}: {key} is {base:g}; a whole number from 2 to {_LARGEST:,} is needed.")
    return int(next(iter(bases.values()))) if bases else None


def _refuse_scaling(parameters: _Fields, key: str) -> None:
    for name in ("rope_type", "type"):  # the older spelling
        kind = parameters.config.get(name)
        if kind not in (None, "default"):
            raise ConversionError(
                f"{parameters.path}: {key}.{name} is {quote(kind)}; NeoBERT's rotary angles are not scaled, which is "
                "'default'."
            )
    known = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    if unknown := [name for name in parameters.config if name not in known]:
        raise ConversionError(
            f"{parameters.path}: {key} has {quote(unknown[0])}; NeoBERT's rotary angles depend on rope_theta alone. "
            "Only a model without it can be read."
        )
