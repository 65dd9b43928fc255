"""config.json of the three layouts: written from our settings, and read into them.

Written: every convention that the function depends on (rotary base and style, epsilon, widths); nothing is left to a
default. Read: the same, never assumed; what our layers cannot compute is refused with the reason.

Source: transformers >= 5.3 models/eurobert and models/llama; chandar-lab/NeoBERT on the Hub, config.json and model.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from checkpoint_conversion.mapping import TABLES, ModelShape
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import ConversionError
from megatron_neobert.huggingface.checks import quote

_INIT_RANGE = 0.02  # of the heads that fine-tuning adds; the published model draws these from N(0, 0.02)
_LARGEST = 2**31 - 1  # no model has a larger size, and a product of two stays within 64 bits
# The published code has no setting for it; rotary.py there defaults to this base and no caller passes another.
_NEOBERT_ROTARY_BASE = 10_000

# Keys with the only values that our layers can follow, and why; None among them lets the key be absent.
_Demands = tuple[tuple[str, tuple[object, ...], str], ...]
_LLAMA_LIKE: _Demands = (
    ("hidden_act", ("silu", "swish"), "NeoBERT's feed-forward is SwiGLU, which gates with SiLU"),
    ("attention_bias", (None, False), "NeoBERT's attention has no biases to hold them"),
)
_OF_ALL: _Demands = (
    ("quantization_config", (None,), "weights that are stored quantised cannot be trained further, use the original"),
    ("compression_config", (None,), "weights that are stored compressed cannot be trained further, use the original"),
    ("partial_rotary_factor", (None, 1, 1.0), "NeoBERT rotates every channel of a head, which is 1.0"),
    ("tie_word_embeddings", (None, False, True), "it decides whether the decoder is the embedding"),
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


class FolderConfig(NamedTuple):
    """A model that our settings can express, and what else its weights are to be read by."""

    layout: str  # a name in mapping.TABLES
    model: ModelConfig
    vocab_size: int
    tied: bool  # the decoder's weight is the embedding
    has_biases: bool  # in the feed-forward and, with it, in EuroBERT's decoder
    notes: tuple[str, ...]


# --- writing


@dataclass(frozen=True)
class FolderSpec:
    """Model and tokenizer that a folder is written from."""

    shape: ModelShape
    tokenizer: Tokenizer
    dtype: torch.dtype = torch.float32
    model_max_length: int | None = None  # tokens at which the tokenizer truncates; None: max_position_embeddings

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def build_config(layout: str, spec: FolderSpec) -> dict[str, Any]:
    """Return the fields of config.json.

    EuroBERT's decoder has a bias only if its feed-forward layers have biases too, hence `mlp_bias`.

    A Llama whose tokens all see each other has two keys, because each has readers that ignore the other: `is_causal` is
    read by transformers >= 5.3 and by vLLM; `use_bidirectional_attention`, with a base of the rotary angles outside
    `rope_parameters`, by Text Embeddings Inference, which otherwise computes causal attention.
    Source: huggingface/text-embeddings-inference@18ce33c backends/candle/src/models/llama.rs.

    Raises:
        ConversionError: The layout's fields cannot hold the model.
    """
    if layout == "neobert":
        return neobert_config(spec)
    model, tokenizer = spec.shape.model, spec.tokenizer
    theta = float(model.rotary_base)
    shared = {
        "dtype": spec.dtype_name,
        "vocab_size": spec.shape.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_attention_heads,
        "head_dim": model.hidden_size // model.num_attention_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": _INIT_RANGE,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
    }
    if layout == "eurobert":
        return {
            "architectures": ["EuroBertForMaskedLM"],
            "model_type": "eurobert",
            **shared,
            "mlp_bias": True,
            "mask_token_id": tokenizer.mask_id,
            "classifier_pooling": "bos",
        }
    return {
        "architectures": ["LlamaModel"],
        "model_type": "llama",
        "is_causal": False,
        "use_bidirectional_attention": True,
        "rope_theta": theta,
        **shared,
        "mlp_bias": False,
        "use_cache": False,
    }


def neobert_config(spec: FolderSpec) -> dict[str, Any]:
    """Return the published fields, and `max_position_embeddings` beside `max_length`.

    The published class takes its longest input from the latter alone, 1,024 tokens without it; transformers 5 saves
    only the former, because it takes the other for a setting of text generation.

    Raises:
        ConversionError: The feed-forward's width has no value in these fields.
    """
    from megatron_neobert.huggingface.modeling_neobert import AUTO_MAP  # transformers: seconds

    model, tokenizer = spec.shape.model, spec.tokenizer
    if model.ffn_width % 8:
        raise ConversionError(
            f"--ffn-hidden-size {model.ffn_width} is not a multiple of 8, as every width in the neobert layout "
            "is; use --format eurobert."
        )
    return {
        "architectures": ["NeoBERTForMaskedLM"],
        "auto_map": AUTO_MAP,
        "model_type": "neobert",
        "vocab_size": spec.shape.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "dim_head": model.hidden_size // model.num_attention_heads,
        "intermediate_size": model.ffn_width * 3 // 2,  # whose two thirds are the width, as readers expect
        "max_position_embeddings": model.max_position_embeddings,
        "max_length": model.max_position_embeddings,
        "norm_eps": model.norm_epsilon,
        "rope_theta": float(model.rotary_base),
        "embedding_init_range": model.init_method_range,
        "decoder_init_range": model.init_method_range,
        "classifier_init_range": _INIT_RANGE,
        "tie_word_embeddings": False,
        "tokenizer_class": "PreTrainedTokenizerFast",  # pipelines of transformers 4.48 find the tokenizer by it
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
        "cls_token_id": tokenizer.cls_id,
        "sep_token_id": tokenizer.sep_id,
        "mask_token_id": tokenizer.mask_id,
        "torch_dtype": spec.dtype_name,  # transformers 4.48 knows no other name
    }


# --- reading


class _Fields(NamedTuple):
    """The values of a config.json, each checked as it is read."""

    config: dict[str, Any]
    path: Path

    def size(self, key: str) -> int:
        value = self.config.get(key)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise self.wrong(key, f"a whole number from 1 to {_LARGEST:,} is needed")
        return value

    def number(self, key: str) -> float:
        value: Any = self.config.get(key)
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
            raise self.wrong(key, f"a number from 0 to {_LARGEST:,} is needed")
        return float(value)

    def demand(self, key: str, accepted: tuple[object, ...], reason: str) -> None:
        value = self.config.get(key)
        if not any(type(value) is type(one) and value == one for one in accepted):  # True is not 1
            raise self.wrong(key, reason)

    def wrong(self, key: str, rule: str) -> ConversionError:
        value = self.config.get(key)
        found = f"{key} is missing" if value is None else f"{key} is {quote(value)}"
        return ConversionError(f"{self.path}: {found}; {rule}.")


def read_model_config(config: dict[str, Any], path: Path) -> FolderConfig:
    """Return the settings of a model from the content of its config.json; `path` is the file, for messages.

    Raises:
        ConversionError: A value is missing, of the wrong kind, or asks for something that NeoBERT's layers are not.
    """
    fields, layout = _Fields(config, path), config.get("model_type")
    if layout not in tuple(TABLES):  # a tuple, because a stranger's value may not be hashable
        raise fields.wrong("model_type", f"only folders of {', '.join(TABLES)} hold layers like NeoBERT's")
    for demand in (*_OF_ALL, *_DEMANDS[layout]):
        fields.demand(*demand)
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    if hidden % heads or (hidden // heads) % 2:
        rule = f"hidden_size {hidden} must give each head the same, even number of channels"
        raise fields.wrong("num_attention_heads", rule)
    width = f"NeoBERT's heads are hidden_size / num_attention_heads = {hidden // heads} wide"
    fields.demand("head_dim", (None, hidden // heads), width)
    fields.demand("dim_head", (None, hidden // heads), width)
    own = f"NeoBERT's {heads} heads have keys and values of their own, not shared ones"
    fields.demand("num_key_value_heads", (None, heads), own)
    is_neobert, notes = layout == "neobert", []
    ffn_width, positions = fields.size("intermediate_size"), "max_position_embeddings"
    if is_neobert:
        # The file has 3/2 of SwiGLU's width, before that is rounded up to a multiple of 8: model.py EncoderBlock. The
        # published name of the longest row is max_length, which transformers 5 no longer saves.
        ffn_width = 8 * -(-(2 * ffn_width // 3) // 8)
        if config.get("max_length") is not None:
            if config.get(positions) is not None:
                rule = f"max_position_embeddings is {quote(config[positions])}; remove the wrong one"
                fields.demand("max_length", (config[positions],), rule)
            positions = "max_length"
    rotary_base = read_rotary_base(fields)
    if rotary_base is None and is_neobert:
        rotary_base = _NEOBERT_ROTARY_BASE
        notes.append(f"the rotary base is {rotary_base:,}, which NeoBERT's published code fixes; config.json has none")
    # The start of the weights is recorded by NeoBERT's own layout alone, and has no effect on weights that exist.
    has_start = config.get("embedding_init_range") is not None
    model = ModelConfig(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn_width,
        max_position_embeddings=fields.size(positions),
        rotary_base=fields.size("rope_theta") if rotary_base is None else rotary_base,  # missing: refused
        norm_epsilon=fields.number("norm_eps" if is_neobert else "rms_norm_eps"),
        init_method_range=fields.number("embedding_init_range") if has_start else ModelConfig().init_method_range,
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
    """Return the base of unscaled rotary angles over whole heads, wherever a version of transformers writes it."""
    bases = {"rope_theta": fields.config.get("rope_theta")}
    plain = {"rope_type": (None, "default"), "type": (None, "default"), "partial_rotary_factor": (None, 1, 1.0)}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = fields.config.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise fields.wrong(key, "an object with rope_type and rope_theta is needed")
        for name, value in parameters.items():
            if name != "rope_theta" and not any(value == one for one in plain.get(name, ())):
                raise ConversionError(
                    f"{fields.path}: {key} has {quote(name)} {quote(value)}; NeoBERT's rotary angles are not scaled, "
                    "they depend on rope_theta alone. Only a model without it can be read."
                )
        bases[f"{key}.rope_theta"] = parameters.get("rope_theta")
    given = {key: base for key, base in bases.items() if base is not None}
    for key, base in given.items():
        if type(base) not in (int, float) or not 2 <= base <= _LARGEST or base != int(base):
            rule = f"a whole number from 2 to {_LARGEST:,} is needed"
            raise ConversionError(f"{fields.path}: {key} is {quote(base)}; {rule}.")
    if len(set(given.values())) > 1:
        found = " and ".join(f"{key} {base:g}" for key, base in given.items())
        raise ConversionError(f"{fields.path}: {found} contradict each other; remove the wrong one.")
    return int(next(iter(given.values()))) if given else None
