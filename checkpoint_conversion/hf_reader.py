"""A Hugging Face folder as data: settings, tokenizer, and weights under the names of a table in mapping.py.

Nothing of the folder is run, and transformers takes no part; hf_folder.py holds what such a folder may contain. Every
tensor in the files is used exactly once, or left out with a note. What NeoBERT has and a folder leaves to a rule (a
decoder tied to the embedding, biases that are not there) is filled in, with a note as well. Names, shapes and dtypes
are compared before any tensor is read; mapping.py checks the values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint_conversion.hf_config import FolderConfig, read_model_config
from checkpoint_conversion.hf_folder import (
    DEEPSPEED_WEIGHTS,
    HEAD_FOLDER,
    WEIGHTS,
    StoredTensor,
    check_folder,
    list_tensors,
    quote,
    quote_names,
)
from checkpoint_conversion.mapping import TABLES, published_shapes
from checkpoint_conversion.tensor_rules import STRIP_PADDING, shape_of
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConversionError, MissingInputError

_DTYPES = ("F32", "BF16", "F16")
_LEFTOVERS = ("rotary_emb.inv_freq", "freqs_cis")  # tables that older code stored; they follow from the rotary base

_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ImportedModel:
    """A published model that training can continue from."""

    folder: Path
    layout: str  # of mapping.TABLES
    model: ModelConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]  # fp32 or bf16, complete under the layout's published names
    notes: tuple[str, ...]  # what was left out, filled in or widened


class FolderWeights(NamedTuple):
    """Tensors of one layout, and what was left out, filled in or widened."""

    layout: str  # of mapping.TABLES
    tensors: dict[str, Tensor]
    notes: list[str]


class _Absent(NamedTuple):
    """Published names that no file holds, by what stands in for them."""

    tied: list[str]  # the embedding
    zero: list[str]


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
    tokenizer = _read_tokenizer(folder, config, may_be_padded=drop_padding)
    weights = read_weights(folder, config)
    cut = _drop_padding(folder, weights, tokenizer.vocab_size) if config.vocab_size > tokenizer.vocab_size else []
    mask = []  # what text is masked with is the tokenizer's business
    if config.mask_token_id not in (None, tokenizer.mask_id):
        stated = f"mask_token_id {quote(config.mask_token_id)} of config.json"
        mask = [f"{stated} is not kept: the tokenizer's mask token is {tokenizer.mask_id}"]
    return ImportedModel(
        folder=folder,
        layout=weights.layout,
        model=config.model,
        tokenizer=tokenizer,
        weights=weights.tensors,
        notes=(*config.notes, *mask, *weights.notes, *cut),
    )


def _drop_padding(folder: Path, weights: FolderWeights, vocab_size: int) -> list[str]:
    """Cuts embedding and decoder to the tokenizer's ids, and returns a note of it."""
    padded = [name for row in TABLES[weights.layout] if row.rule is STRIP_PADDING for name in row.published]
    for name in padded:
        if weights.tensors[name][vocab_size:].any():
            raise ConversionError(
                f"{folder}: {name} is not zero in its rows from {vocab_size} on, which the tokenizer has no ids for; "
                "only rows of zeros can be dropped."
            )
    rows = len(weights.tensors[padded[0]])
    weights.tensors.update({name: weights.tensors[name][:vocab_size].clone() for name in padded})
    return [f"dropped {rows - vocab_size} rows of zeros, for which the tokenizer has no ids, from the vocabulary"]


def _read_tokenizer(folder: Path, config: FolderConfig, *, may_be_padded: bool) -> Tokenizer:
    try:
        tokenizer = load_tokenizer(folder)
    except MissingInputError as error:
        raise MissingInputError(
            f"{folder} holds no tokenizer; put the tokenizer.json or vocab.txt into it that the model was trained with."
        ) from error
    rows, ids = config.vocab_size, tokenizer.vocab_size
    if ids > rows:
        raise ConversionError(
            f"{folder}: the tokenizer has {ids} ids and the embedding {rows} rows (vocab_size of config.json); every "
            "id needs a row. The tokenizer belongs to another model."
        )
    if ids < rows and not may_be_padded:
        raise ConversionError(
            f"{folder}: the tokenizer has {ids} ids and the embedding {rows} rows (vocab_size of config.json); rows "
            "that belong to no token would take part in every prediction. If they are zeros, add "
            "--drop-padded-vocabulary; else give the tokenizer a placeholder for each of them."
        )
    return tokenizer


def read_weights(folder: Path, config: FolderConfig) -> FolderWeights:
    """Reads what the folder's config.json describes.

    Raises:
        MissingInputError: There are no weights.
        ConversionError: They are not those of the config, or there is no masked-language-model head.
    """
    stored = _list_stored(folder, config)
    kept = {name: entry for name, entry in stored.items() if not name.endswith(_LEFTOVERS)}
    # NeoBERT's names exist with the two halves of SwiGLU fused, as published, and apart.
    has_halves = any(name.endswith(".ffn.w1.weight") for name in kept)
    layout = "neobert-unpacked" if config.layout == "neobert" and has_halves else config.layout
    if config.model.num_layers > len(kept):  # before names are made for each of these
        raise ConversionError(
            f"{folder}: config.json has num_hidden_layers {config.model.num_layers:,}, but the files hold "
            f"{len(kept):,} tensors, fewer than layers; fetch the folder again."
        )
    shapes = published_shapes(TABLES[layout], shape_of(config.model, vocab_size=config.vocab_size))
    names = _match_names(folder, kept, shapes)
    wrapped = [source for source in kept if _unwrapped(source) != source]
    absent = _find_absent(folder, layout, config, names, shapes)
    for name, source in names.items():
        _check_entry(source, kept[source], shapes[name])
    tensors = {name: kept[source].read() for name, source in names.items()}
    embedding_name, decoder = _embedding_and_decoder(layout)
    embedding = tensors[embedding_name]
    if config.tied and not absent.tied and (differing := int((tensors[decoder] != embedding).sum())):
        raise ConversionError(
            f"{folder}: config.json has tie_word_embeddings true, but {decoder} differs from the embedding in "
            f"{differing:,} of {embedding.numel():,} values; set it to false, or remove the tensor."
        )
    notes = _describe(stored, kept, wrapped)
    if halves := [name for name, tensor in tensors.items() if tensor.dtype == torch.float16]:
        tensors |= {name: tensors[name].float() for name in halves}  # exactly: nothing here stores float16
        notes.append(
            f"{len(halves)} of {len(tensors)} tensors were float16 and are float32 now, their values unchanged"
        )
    notes += [f"{name} is a copy of the embedding; training does not keep them equal" for name in absent.tied]
    if absent.zero:
        notes.append(f"filled with zeros, as the files lack them: {quote_names(absent.zero)}")
    embedding = tensors[embedding_name]
    tensors |= {name: embedding.clone() for name in absent.tied}
    tensors |= {name: embedding.new_zeros(shapes[name]) for name in absent.zero}
    return FolderWeights(layout, tensors, notes)


def _list_stored(folder: Path, config: FolderConfig) -> dict[str, StoredTensor]:
    """What the files hold; of a Llama, the head beside it as well."""
    stored = list_tensors(folder)
    if config.layout != "llama":
        return stored
    if not (folder / HEAD_FOLDER / WEIGHTS).is_file():
        raise ConversionError(
            f"{folder}: there is no {HEAD_FOLDER}/{WEIGHTS}, so it holds no masked-language-model head (what Llama "
            "calls lm_head predicts the next token); pre-training continues only from a model with its own head."
        )
    head = list_tensors(folder / HEAD_FOLDER)
    if twice := sorted(stored.keys() & head.keys()):
        raise ConversionError(f"{folder}: {quote(twice[0])} is in {HEAD_FOLDER} as well; remove one of them.")
    return stored | head


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
    _, decoder = _embedding_and_decoder(layout)
    biases = [name for name in shapes if name.endswith(".bias") and not config.has_biases]
    if layout == "eurobert" and (ignored := [name for name in biases if name in names]):
        raise ConversionError(
            f"{folder}: config.json has mlp_bias false, but the files hold {quote_names(ignored)}, which transformers "
            "would ignore; set it to true, or remove them."
        )
    tied = [decoder] if config.tied and decoder not in names else []
    fillable = {*biases, *tied}
    missing = [name for name in shapes if name not in names and name not in fillable]
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


def _describe(stored: Mapping[str, StoredTensor], kept: Mapping[str, StoredTensor], wrapped: list[str]) -> list[str]:
    """Notes on what differs in the files from published ones."""
    notes = []
    if left_out := [name for name in stored if name not in kept]:
        notes.append(f"left out {quote_names(left_out)}: rotary angles follow from the base")
    if wrapped:
        notes.append(f"'module.' and '_orig_mod.' are left out of {len(wrapped)} names, such as {quote(wrapped[0])}")
    entry = next(iter(kept.values()))
    if entry.file.name == DEEPSPEED_WEIGHTS and entry.dtype != "F32":
        notes.append(
            f"the weights of {entry.file.name} are {entry.dtype}, as the forward rounds them; the optimizer's fp32 "
            "weights lie in other files, out of which DeepSpeed's zero_to_fp32.py makes a state dict"
        )
    return notes


def _embedding_and_decoder(layout: str) -> tuple[str, str]:
    """Their published names: the first row of every table, and the last but one."""
    return TABLES[layout][0].published[0], TABLES[layout][-2].published[0]
