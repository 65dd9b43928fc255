"""A Hugging Face folder as data: settings, tokenizer, and weights under the names of a table in mapping.py.

Nothing of the folder is run, and no class of transformers takes part; hf_folder.py holds what such a folder may
contain. What decides the function of the model (norm epsilon, rotary base, activation, widths) is read from config.json
and never assumed; what our layers cannot compute is refused with the reason. Every tensor in the files is used exactly
once, or left out with a note. What NeoBERT has and a folder leaves to a rule (a decoder tied to the embedding, biases
that are not there) is filled in, with a note as well. Names, shapes and dtypes are compared before any tensor is read;
mapping.py checks the values.

Source: transformers 5 models/eurobert, models/llama; chandar-lab/NeoBERT on the Hub, config.json and model.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoint_conversion.hf_folder import StoredTensor, list_tensors
from checkpoint_conversion.mapping import STRIP_PADDING, TABLES, published_shapes, shape_of
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.huggingface.checks import check_folder, quote, quote_names

LAYOUTS = tuple(TABLES)

_LARGEST = 2**31 - 1  # no model has a larger size, and a product of two stays within 64 bits
# The published code has no setting for it; rotary.py there defaults to this base and nobody passes another.
_NEOBERT_ROTARY_BASE = 10_000
_DTYPES = ("F32", "BF16", "F16")
_LEFTOVERS = ("rotary_emb.inv_freq", "freqs_cis")  # tables that older code stored; they follow from the rotary base

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

    layout: str  # one of LAYOUTS
    model: ModelConfig
    vocab_size: int
    tied: bool  # the decoder's weight is the embedding
    has_biases: bool  # in the feed-forward and, with it, in EuroBERT's decoder
    mask_token_id: object  # as it stands there
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ImportedModel:
    """A published model that training can continue from."""

    layout: str  # one of LAYOUTS
    model: ModelConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]  # fp32 or bf16, complete under the layout's published names
    notes: tuple[str, ...]  # what was left out, filled in or widened


def read_folder(folder: Path, *, drop_padding: bool = False) -> ImportedModel:
    """Reads a folder in EuroBERT's, NeoBERT's or the bidirectional Llama's layout.

    Args:
        drop_padding: Cut off the vocabulary's rows behind the tokenizer's last id, if all of them are zero.

    Raises:
        MissingInputError: There is no such folder, or no config, tokenizer or weights in it.
        ConversionError: It holds something that NeoBERT's layers cannot compute, or its files do not fit together.
        DataError: The tokenizer cannot be used.
    """
    config = read_model_config(check_folder(folder), folder / "config.json")
    try:
        tokenizer = load_tokenizer(folder)
    except MissingInputError as error:
        raise MissingInputError(
            f"{folder} holds no tokenizer; put the tokenizer.json or vocab.txt into it that the model was trained with."
        ) from error
    ids, rows = tokenizer.vocab_size, config.vocab_size
    if ids > rows or (ids < rows and not drop_padding):
        remedy = (
            "every id needs a row. The tokenizer belongs to another model."
            if ids > rows
            else "rows that belong to no token would take part in every prediction. If they are zeros, add "
            "--drop-padded-vocabulary; else give the tokenizer a placeholder for each of them."
        )
        raise ConversionError(
            f"{folder}: the tokenizer has {ids} ids and the embedding {rows} rows (vocab_size of config.json); {remedy}"
        )
    weights, notes = read_weights(folder, config)
    if ids < rows:
        for name in (name for row in TABLES[config.layout] if row.rule is STRIP_PADDING for name in row.published):
            if weights[name][ids:].any():
                raise ConversionError(
                    f"{folder}: {name} is not zero in its rows from {ids} on, which the tokenizer has no ids for; only "
                    "rows of zeros can be dropped."
                )
            weights[name] = weights[name][:ids].clone()
        notes.append(f"dropped {rows - ids} rows of zeros, for which the tokenizer has no ids, from the vocabulary")
    if config.mask_token_id not in (None, tokenizer.mask_id):  # what text is masked with is the tokenizer's business
        stated = f"mask_token_id {quote(config.mask_token_id)} of config.json"
        notes.append(f"{stated} is not kept: the tokenizer's mask token is {tokenizer.mask_id}")
    return ImportedModel(config.layout, config.model, tokenizer, weights, (*config.notes, *notes))


# --- config.json


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
    """The settings of a model out of its config.json.

    Args:
        path: Of the file, for messages.

    Raises:
        ConversionError: A value is missing, of the wrong kind, or asks for something that NeoBERT's layers are not.
    """
    fields, layout = _Fields(config, path), config.get("model_type")
    if layout not in LAYOUTS:
        raise fields.wrong("model_type", f"only folders of {', '.join(LAYOUTS)} hold layers like NeoBERT's")
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
    rotary_base = _read_rotary_base(fields)
    if rotary_base is None and is_neobert:
        rotary_base = _NEOBERT_ROTARY_BASE
        notes.append(f"the rotary base is {rotary_base:,}, which NeoBERT's published code fixes; config.json has none")
    for key in ("dropout", "attention_dropout"):  # no part of what the weights compute
        if config.get(key) is not None and (rate := fields.number(key)):
            notes.append(f"{key} {rate:g} of config.json is not kept: training here has none")
    # What the weights started from: recorded by NeoBERT's own layout alone, without effect on weights that exist.
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
        mask_token_id=config.get("mask_token_id"),
        notes=tuple(notes),
    )


def _read_rotary_base(fields: _Fields) -> int | None:
    """The base of unscaled rotary angles over whole heads, from any place where a version of transformers writes it."""
    bases = {"rope_theta": fields.config.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        parameters = fields.config.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise fields.wrong(key, "an object with rope_type and rope_theta is needed")
        plain = {"rope_type": (None, "default"), "type": (None, "default"), "partial_rotary_factor": (None, 1, 1.0)}
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


# --- weights


def read_weights(folder: Path, config: FolderConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Reads what the folder's config.json describes.

    Returns:
        The tensors under the layout's published names, and notes on what was left out, filled in or widened.

    Raises:
        MissingInputError: There are no weights.
        ConversionError: They are not those of the config, or there is no masked-language-model head.
    """
    stored = list_tensors(folder, layout=config.layout)
    kept = {name: entry for name, entry in stored.items() if not name.endswith(_LEFTOVERS)}
    if config.model.num_layers > len(kept):  # before names are made for each of these
        raise ConversionError(
            f"{folder}: config.json has num_hidden_layers {config.model.num_layers:,}, but the files hold "
            f"{len(kept):,} tensors, fewer than layers; fetch the folder again."
        )
    shapes = published_shapes(TABLES[config.layout], shape_of(config.model, vocab_size=config.vocab_size))
    names = _match_names(folder, kept, shapes)
    embedding, decoder = (TABLES[config.layout][row].published[0] for row in (0, -2))
    tied = [decoder] if config.tied and decoder not in names else []
    zero = _find_zero_biases(folder, config, names, shapes, decoder="" if tied else decoder)
    for name, source in names.items():
        _check_entry(source, kept[source], shapes[name])
    tensors = {name: kept[source].read() for name, source in names.items()}
    if config.tied and not tied and (differing := int((tensors[decoder] != tensors[embedding]).sum())):
        raise ConversionError(
            f"{folder}: config.json has tie_word_embeddings true, but {decoder} differs from the embedding in "
            f"{differing:,} of {tensors[embedding].numel():,} values; set it to false, or remove the tensor."
        )
    notes = _describe(stored, kept)
    if halves := [name for name, tensor in tensors.items() if tensor.dtype == torch.float16]:
        tensors |= {name: tensors[name].float() for name in halves}  # exactly: nothing here stores float16
        notes.append(
            f"{len(halves)} of {len(tensors)} tensors were float16 and are float32 now, their values unchanged"
        )
    if tied:
        notes.append(f"{decoder} is a copy of the embedding; training does not keep them equal")
        tensors[decoder] = tensors[embedding].clone()
    if zero:
        notes.append(f"filled with zeros, as the files lack them: {quote_names(zero)}")
        tensors |= {name: tensors[embedding].new_zeros(shapes[name]) for name in zero}
    return tensors, notes


def _match_names(folder: Path, stored: Mapping[str, StoredTensor], shapes: Mapping[str, Any]) -> dict[str, str]:
    """Published name -> name in the files, which may lack the prefix "model." or have one too many, or others'."""
    names: dict[str, str] = {}
    for source in stored:
        plain = _unwrapped(source)
        spellings = (plain, f"model.{plain}", plain.removeprefix("model."))
        name = next((one for one in spellings if one in shapes), source)
        if name in names:
            raise ConversionError(f"{folder}: {quote(names[name])} and {quote(source)} are one weight; remove either.")
        names[name] = source
    return names


def _unwrapped(name: str) -> str:
    """Return a name without the prefixes that DDP and torch.compile add."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _find_zero_biases(
    folder: Path, config: FolderConfig, names: dict[str, str], shapes: Mapping[str, Any], *, decoder: str
) -> list[str]:
    """The biases that no file holds and that are zeros.

    Args:
        decoder: Published name of the weight that must be there; empty where the embedding is that.

    Raises:
        ConversionError: The files lack something else, or hold what the model has not.
    """
    biases = [name for name in shapes if name.endswith(".bias") and not config.has_biases]
    if config.layout == "eurobert" and (ignored := [name for name in biases if name in names]):
        raise ConversionError(
            f"{folder}: config.json has mlp_bias false, but the files hold {quote_names(ignored)}, which transformers "
            "would ignore; set it to true, or remove them."
        )
    tied = () if decoder else (TABLES[config.layout][-2].published[0],)
    missing = [name for name in shapes if name not in names and name not in (*biases, *tied)]
    unknown = [source for name, source in names.items() if name not in shapes]
    if decoder in missing:
        others = f", but {quote_names(unknown)}" if unknown else ""
        raise ConversionError(
            f"{folder}: there is no {decoder}{others}. Pre-training continues only from a model with its "
            "masked-language-model head; if the embedding is that decoder, config.json must have "
            '"tie_word_embeddings": true.'
        )
    if unknown:
        raise ConversionError(
            f"{folder}: NeoBERT has no place for {quote_names(unknown)}; config.json has num_hidden_layers "
            f"{config.model.num_layers} and the layout {config.layout}. Fetch the folder again, or save it without."
        )
    if missing:
        raise ConversionError(
            f"{folder}: the files lack {quote_names(missing)}; a {config.layout} folder of {config.model.num_layers} "
            f"layers holds {len(shapes)} tensors. Fetch it again."
        )
    return [name for name in biases if name not in names]


def _check_entry(name: str, entry: StoredTensor, shape: tuple[int, ...]) -> None:
    if entry.dtype not in _DTYPES:
        raise ConversionError(
            f"{entry.file}: {quote(name)} is stored as {entry.dtype}; only {', '.join(_DTYPES)} are kept exactly. "
            "Save the weights as float32."
        )
    if entry.shape != shape:
        raise ConversionError(
            f"{entry.file}: {quote(name)} has shape {entry.shape}; the sizes in config.json give it {shape}. One of "
            "the files belongs to another model."
        )


def _describe(stored: Mapping[str, StoredTensor], kept: Mapping[str, StoredTensor]) -> list[str]:
    """Notes on what differs in the files from published ones."""
    notes = []
    if left_out := [name for name in stored if name not in kept]:
        notes.append(f"left out {quote_names(left_out)}: rotary angles follow from the base")
    if wrapped := [name for name in kept if _unwrapped(name) != name]:
        notes.append(f"'module.' and '_orig_mod.' are left out of {len(wrapped)} names, such as {quote(wrapped[0])}")
    return notes
