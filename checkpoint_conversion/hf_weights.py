"""The weights of a Hugging Face folder, complete and under the published names of a table in mapping.py.

Every tensor in the files is used exactly once, or left out with a note. What NeoBERT has and a folder leaves to a rule
(a decoder tied to the embedding, biases that are not there) is filled in, with a note as well. Names, shapes and
dtypes are compared before any tensor is read; mapping.py checks the values.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint_conversion.hf_config import FolderConfig
from checkpoint_conversion.hf_folder import (
    DEEPSPEED_WEIGHTS,
    HEAD_FOLDER,
    WEIGHTS,
    StoredTensor,
    list_tensors,
    load_tensors,
    quote,
)
from checkpoint_conversion.mapping import TABLES, published_shapes
from checkpoint_conversion.tensor_rules import ModelShape
from megatron_neobert.errors import ConversionError

_DTYPES = ("F32", "BF16", "F16")
_LEFTOVERS = ("rotary_emb.inv_freq", "freqs_cis")  # tables that older code stored; they follow from the rotary base
_LISTED_NAMES = 4  # names that a message spells out before it counts the rest

_Shapes = dict[str, tuple[int, ...]]


class Weights(NamedTuple):
    """Tensors of one layout, and what was left out, filled in or widened."""

    layout: str  # of mapping.TABLES
    tensors: dict[str, Tensor]
    notes: list[str]


class _Absent(NamedTuple):
    """Published names that no file holds, by what stands in for them."""

    tied: list[str]  # the embedding
    zero: list[str]


def read_weights(folder: Path, config: FolderConfig) -> Weights:
    """Reads what the folder's config.json describes.

    Raises:
        MissingInputError: There are no weights.
        ConversionError: They are not those of the config, or there is no masked-language-model head.
    """
    stored = _list_stored(folder, config)
    kept = {name: entry for name, entry in stored.items() if not name.endswith(_LEFTOVERS)}
    layout = _find_layout(config, kept)
    shapes = _expected_shapes(folder, layout, config, kept)
    names = _match_names(folder, kept, shapes)
    wrapped = [source for source in kept if _unwrapped(source) != source]
    absent = _find_absent(folder, layout, config, names, shapes)
    for name, source in names.items():
        _check_entry(source, kept[source], shapes[name])
    tensors = load_tensors(kept, names)
    if config.tied and not absent.tied:
        _check_tied(folder, layout, tensors)
    notes = _describe_leftovers(stored, kept) + _describe_pickle(kept, wrapped) + _widen_halves(tensors)
    embedding = tensors[_embedding(layout)]
    tensors |= {name: embedding.clone() for name in absent.tied}
    tensors |= {name: embedding.new_zeros(shapes[name]) for name in absent.zero}
    return Weights(layout, tensors, notes + _describe_absent(absent))


def _list_stored(folder: Path, config: FolderConfig) -> dict[str, StoredTensor]:
    """What the files hold; of a Llama, the head beside it as well."""
    stored = list_tensors(folder)
    if config.layout != "llama":
        return stored
    if not (folder / HEAD_FOLDER / WEIGHTS).is_file():
        raise ConversionError(
            f"{folder}: there is no {HEAD_FOLDER}/{WEIGHTS}, so it holds no masked-language-model head (what Llama "
            "calls lm_head predicts the next token); pre-training goes on only from a model with its own head."
        )
    head = list_tensors(folder / HEAD_FOLDER)
    if twice := sorted(stored.keys() & head.keys()):
        raise ConversionError(f"{folder}: {quote(twice[0])} is in {HEAD_FOLDER} as well; remove one of them.")
    return stored | head


def _find_layout(config: FolderConfig, stored: Mapping[str, StoredTensor]) -> str:
    """NeoBERT's names exist with the two halves of SwiGLU fused, as published, and apart."""
    has_halves = any(name.endswith(".ffn.w1.weight") for name in stored)
    return "neobert-unpacked" if config.layout == "neobert" and has_halves else config.layout


def _expected_shapes(folder: Path, layout: str, config: FolderConfig, stored: Mapping[str, StoredTensor]) -> _Shapes:
    """Every published tensor of the model and its shape."""
    model = config.model
    if model.num_layers > len(stored):  # before names are made for each of these
        raise ConversionError(
            f"{folder}: config.json says num_hidden_layers {model.num_layers:,}, but the files hold {len(stored):,} "
            "tensors, fewer than layers; fetch the folder again."
        )
    shape = ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_width,
        vocab_size=config.vocab_size,
        padded_vocab_size=config.vocab_size,
    )
    return published_shapes(TABLES[layout], shape)


def _match_names(folder: Path, stored: Mapping[str, StoredTensor], shapes: _Shapes) -> dict[str, str]:
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
    """A name without what DDP, DeepSpeed and torch.compile put before it."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _find_absent(folder: Path, layout: str, config: FolderConfig, names: dict[str, str], shapes: _Shapes) -> _Absent:
    """What the files do not hold and a rule gives.

    Raises:
        ConversionError: No rule gives it, or the files hold what the model has not.
    """
    decoder = f"{_head(layout)}.weight"
    biases = [name for name in shapes if name.endswith(".bias") and not config.has_biases]
    if layout == "eurobert" and (ignored := [name for name in biases if name in names]):
        raise ConversionError(
            f"{folder}: config.json says mlp_bias false, but the files hold {_join(ignored)}, which transformers "
            "would ignore; set it to true, or remove them."
        )
    tied = [decoder] if config.tied and decoder not in names else []
    fillable = {*biases, *tied}
    missing = [name for name in shapes if name not in names and name not in fillable]
    unknown = [source for name, source in names.items() if name not in shapes]
    if decoder in missing:
        others = f", but {_join(unknown)}" if unknown else ""
        raise ConversionError(
            f"{folder}: there is no {decoder}{others}. Pre-training goes on only from a model with its "
            "masked-language-model head; if the embedding is that decoder, config.json must say "
            '"tie_word_embeddings": true.'
        )
    if unknown:
        raise ConversionError(
            f"{folder}: NeoBERT has no place for {_join(unknown)}; config.json says num_hidden_layers "
            f"{config.model.num_layers} and the layout {config.layout}. Fetch the folder again, or save it without."
        )
    if missing:
        raise ConversionError(
            f"{folder}: the files lack {_join(missing)}; a {config.layout} folder of {config.model.num_layers} layers "
            f"holds {len(shapes)} tensors. Fetch it again."
        )
    return _Absent(tied=tied, zero=[name for name in biases if name not in names])


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


def _check_tied(folder: Path, layout: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuses a decoder that is stored and is not what the config says it is."""
    name = f"{_head(layout)}.weight"
    differing = int((tensors[name] != tensors[_embedding(layout)]).sum())
    if differing:
        raise ConversionError(
            f"{folder}: config.json says tie_word_embeddings true, but {name} differs from the embedding in "
            f"{differing:,} of {tensors[name].numel():,} values; set it to false, or remove the tensor."
        )


def _describe_leftovers(stored: Mapping[str, StoredTensor], kept: Mapping[str, StoredTensor]) -> list[str]:
    left_out = [name for name in stored if name not in kept]
    return [f"left out {_join(left_out)}: rotary angles follow from the base"] if left_out else []


def _describe_pickle(kept: Mapping[str, StoredTensor], wrapped: list[str]) -> list[str]:
    """What a file of training code differs in from a published one."""
    notes = []
    if wrapped:
        notes.append(f"'module.' and '_orig_mod.' are left out of {len(wrapped)} names, such as {quote(wrapped[0])}")
    entry = next(iter(kept.values()))
    if entry.file.name == DEEPSPEED_WEIGHTS and entry.dtype != "F32":
        notes.append(
            f"the weights of {entry.file.name} are {entry.dtype}, as the forward rounds them; the optimizer's fp32 "
            "weights lie in other files, out of which DeepSpeed's zero_to_fp32.py makes a state dict"
        )
    return notes


def _widen_halves(tensors: dict[str, Tensor]) -> list[str]:
    """float16 becomes float32, exactly: nothing here stores it."""
    halves = [name for name, tensor in tensors.items() if tensor.dtype == torch.float16]
    tensors |= {name: tensors[name].float() for name in halves}
    if not halves:
        return []
    return [f"{len(halves)} of {len(tensors)} tensors were float16 and are float32 now, their values unchanged"]


def _describe_absent(absent: _Absent) -> list[str]:
    notes = [f"{name} is a copy of the embedding; training does not keep them equal" for name in absent.tied]
    if absent.zero:
        notes.append(f"filled with zeros, as the files lack them: {_join(absent.zero)}")
    return notes


def _head(layout: str) -> str:
    return "lm_head" if layout == "eurobert" else "decoder"


def _embedding(layout: str) -> str:
    """The published name of the embedding: the first row of every table."""
    return TABLES[layout][0].published[0]


def _join(names: Iterable[str]) -> str:
    """The first names, and the number of the others."""
    listed = list(names)
    more = f" and {len(listed) - _LISTED_NAMES} more" * (len(listed) > _LISTED_NAMES)
    return ", ".join(quote(name) for name in listed[:_LISTED_NAMES]) + more
