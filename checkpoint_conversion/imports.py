"""Read a Hugging Face folder as data (settings, tokenizer, weights), and write it as a checkpoint.

No code of the folder is executed, and no class of transformers is used for reading. Every tensor in the files is used
exactly once, or omitted with a note. Tensors that a folder implies but does not store (a decoder tied to the embedding,
biases of zeros) are added, with a note as well.

Weight files are memory-mapped. Shapes in their headers are compared with the settings before any value is read, and
nothing is allocated for a size that only a header states. Pickled weights are refused without reading them.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from torch import Tensor

from checkpoint_conversion.checkpoint import model_shape, read_checkpoint, write_checkpoint
from checkpoint_conversion.config_json import FolderConfig, read_model_config
from checkpoint_conversion.mapping import (
    STRIP_PADDING,
    TABLES,
    ModelShape,
    check_tensors,
    published_shapes,
    to_internal,
)
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.huggingface.checks import INDEX, WEIGHTS, check_folder, quote, quote_names, read_weight_map
from megatron_neobert.runtime.atomic_files import build_folder
from megatron_neobert.text import parse_json

if TYPE_CHECKING:  # importing transformers takes seconds, and an import without verification does not need it
    from checkpoint_conversion.compare import Checks

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROTARY_TABLES = ("rotary_emb.inv_freq", "freqs_cis")  # stored by older code; computed from the rotary base
_WORD_MARK = "▁"  # of SentencePiece and Metaspace
_REPLACEMENT = "\ufffd"  # decoded from bytes that are not a whole character
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte in SentencePiece's vocabularies


@dataclass(frozen=True)
class ImportedModel:
    """Content of a Hugging Face folder, from which training can continue."""

    layout: str  # a name in mapping.TABLES
    model: ModelConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]  # fp32 or bf16, under all published names of the layout
    notes: tuple[str, ...]  # omitted and added tensors, and assumptions, for the user


def import_folder(
    folder: Path, output: Path, *, tokenizer: Tokenizer | None = None, verified: bool = True
) -> "tuple[ImportedModel, Checks]":
    """Write the model of `folder` as a checkpoint of iteration 0 in the new folder `output`, and verify it.

    Return the content of `folder`, and the differences between the two models' logits (empty if not `verified`).
    If `tokenizer` is given, embedding and decoder are converted to its vocabulary, and nothing is verified.
    """
    imported = read_folder(folder)
    if tokenizer is not None:
        imported, verified = with_vocabulary(imported, tokenizer), False
    shape = model_shape(Settings(model=imported.model), vocab_size=imported.tokenizer.vocab_size)
    tensors = to_internal(imported.weights, shape, TABLES[imported.layout])
    checks: Checks = {}
    with build_folder(output) as temporary:
        write_checkpoint(temporary, tensors, imported.model, imported.tokenizer)
        if verified:
            from checkpoint_conversion.compare import build_logit_model, checkpoint_model, verify

            written = checkpoint_model(read_checkpoint(temporary))
            source = build_logit_model(folder, imported.layout, imported.weights)
            checks = verify(source, lambda _: written, stored=torch.float32, name="the written checkpoint")
    return imported, checks


def read_folder(folder: Path) -> ImportedModel:
    """Read a Hugging Face folder of a layout in mapping.TABLES. Rows of zeros that pad the vocabulary are removed.

    Print a warning if config.json and the tokenizer have different mask tokens.

    Raises:
        MissingInputError: The folder has no tokenizer.
        ConversionError: The tokenizer has more ids than the embedding has rows, or rows without an id are not zero.
    """
    content = check_folder(folder)
    config = read_model_config(content, folder / "config.json")
    try:
        tokenizer = load_tokenizer(folder)
    except MissingInputError as error:
        raise MissingInputError(
            f"{folder} has no tokenizer; add the tokenizer.json or vocab.txt that the model was trained with."
        ) from error
    ids, rows = tokenizer.vocab_size, config.vocab_size
    if ids > rows:
        raise ConversionError(
            f"{folder}: the tokenizer has {ids} ids and the embedding {rows} rows (vocab_size of config.json). Use the "
            "tokenizer that the model was trained with, with at most one id per row."
        )
    if (mask_id := content.get("mask_token_id")) not in (None, tokenizer.mask_id):
        print(
            f"warning: {folder}: [MASK] has id {tokenizer.mask_id} in the tokenizer, but mask_token_id is "
            f"{quote(mask_id)} in config.json; training uses the tokenizer's id.",
            file=sys.stderr,
        )
    weights, notes = read_weights(folder, config)
    if ids < rows:
        padded = [entry.published[0] for entry in TABLES[config.layout] if entry.rule is STRIP_PADDING]
        for name in padded:
            if weights[name][ids:].any():
                raise ConversionError(
                    f"{folder}: the tokenizer has {ids} ids and the embedding {rows} rows, but {name} is not zero in "
                    "rows without an id, which would affect every prediction. Add placeholder tokens to the tokenizer."
                )
            weights[name] = weights[name][:ids].clone()
        notes.append(f"dropped {rows - ids} rows of zeros from the vocabulary, for which the tokenizer has no ids")
    return ImportedModel(config.layout, config.model, tokenizer, weights, (*config.notes, *notes))


# --- weights


def read_weights(folder: Path, config: FolderConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Read the weights of a folder whose config.json was parsed to `config`.

    Return tensors in fp32 or bf16 for all names in the layout's table, and notes on omitted and added tensors. Raises
    ConversionError if the weights do not fit config.json, cannot be converted exactly, or lack a head.
    """
    stored = map_weights(folder)
    # Checked before tables are expanded, because config.json can state any number of layers.
    if config.model.num_layers > len(stored):
        raise ConversionError(
            f"{folder}: the files have {len(stored):,} tensors, fewer than the num_hidden_layers "
            f"{config.model.num_layers:,} of config.json. Fetch the folder again."
        )
    shape = ModelShape(config.model, config.vocab_size, config.vocab_size)
    shapes = published_shapes(TABLES[config.layout], shape)
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(_ROTARY_TABLES)}
    notes = []
    if omitted := [name for name in stored if name not in tensors]:
        notes.append(f"omitted {quote_names(omitted)}: rotary angles follow from the base")
    if wrong := [name for name, tensor in tensors.items() if tensor.dtype not in _DTYPES]:
        raise ConversionError(
            f"{folder}: {quote(wrong[0])} is stored as {tensors[wrong[0]].dtype}; only {', '.join(map(str, _DTYPES))} "
            "can be converted exactly. Save the weights as float32."
        )
    # No output format has float16, and float32 holds its values exactly.
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if tensor.dtype == torch.float16}
    embedding, decoder = (TABLES[config.layout][row].published[0] for row in (0, -2))
    if config.tied and embedding in tensors:
        if not torch.equal(tensors.setdefault(decoder, tensors[embedding].clone()), tensors[embedding]):
            raise ConversionError(
                f"{folder}: config.json has tie_word_embeddings true, but {decoder} differs from the embedding; set it "
                "to false, or remove the tensor."
            )
        notes.append(f"{decoder} is a copy of the embedding; training does not keep them equal")
    biases = [name for name in shapes if name.endswith(".bias") and not config.has_biases]
    if config.layout == "eurobert" and (ignored := [name for name in biases if name in tensors]):
        raise ConversionError(
            f"{folder}: config.json has mlp_bias false, but the files have {quote_names(ignored)}, which transformers "
            "would ignore. Set mlp_bias to true, or remove the tensors."
        )
    implied = [name for name in biases if name not in tensors]
    try:
        check_tensors(tensors, {name: shape for name, shape in shapes.items() if name not in implied})
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from error
    if implied:
        notes.append(f"filled with zeros, because the files lack them: {quote_names(implied)}")
        tensors |= {name: tensors[embedding].new_zeros(shapes[name]) for name in implied}
    return tensors, notes


# --- files


def map_weights(folder: Path) -> dict[str, Tensor]:
    """Memory-map the weights in model.safetensors, or in the files that its index lists. Return {name: tensor}.

    Raises:
        MissingInputError: There are no weights, or a file that the index lists is missing.
        ConversionError: The weights are pickled or damaged, both model.safetensors and an index exist, or a tensor is
            only in the index or only in its files.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise ConversionError(f"{folder} has both {WEIGHTS} and {INDEX}; remove the file of another model.")
    if single.is_file() or index.is_file():
        weight_map = read_weight_map(index) if index.is_file() else {}
        tensors: dict[str, Tensor] = {}
        for file in [WEIGHTS] if single.is_file() else sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise MissingInputError(f"{folder / file}: no such file, but {INDEX} lists it; fetch the folder again.")
            try:
                tensors |= load_file(folder / file)
            except SafetensorError as error:
                raise ConversionError(
                    f"{folder / file}: not a safetensors file ({error!s:.200}); fetch it again."
                ) from error
        if weight_map and (differing := sorted(tensors.keys() ^ weight_map.keys())):
            raise ConversionError(
                f"{folder}: {quote_names(differing)} is only in {INDEX} or only in its files. Fetch the folder again."
            )
        return tensors
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ConversionError(
            f"{folder}: the weights are pickled ({quote(pickles[0])}), and a pickle can run code. Load them with "
            f"torch.load(..., weights_only=True), and save the state dict as {WEIGHTS} with safetensors."
        )
    raise MissingInputError(f"{folder}: neither {WEIGHTS} nor {INDEX}; name a folder with weights.")


# --- another vocabulary
# A token in both vocabularies keeps its rows of the embedding, the decoder and the decoder's bias. Two tokenizers of
# one kind are compared by token strings, others by text and place in a word. Any other token starts with the mean of
# the rows of the old tokens into which its text is divided. A token that is a part of a character starts with the mean
# of all rows. Special tokens keep the rows of their roles. Source: FVT (arXiv 2402.09977), initialization by means.


def with_vocabulary(imported: ImportedModel, tokenizer: Tokenizer) -> ImportedModel:
    """Return a copy of the model, with embedding and decoder converted to the vocabulary of `tokenizer`."""
    vocabulary = map_vocabulary(imported.tokenizer, tokenizer)
    tables = [entry.published[0] for entry in TABLES[imported.layout] if entry.rule is STRIP_PADDING]
    weights = imported.weights | {name: vocabulary.apply(imported.weights[name]) for name in tables}
    return replace(imported, tokenizer=tokenizer, weights=weights, notes=(*imported.notes, vocabulary.note))


@dataclass(frozen=True)
class VocabularyMap:
    """Old tokens from which the weights of each new token are computed."""

    old_ids: list[list[int]]  # averaged; empty if the old vocabulary does not have the text: the mean of all rows
    copied: int  # tokens of both vocabularies, special ones included

    @property
    def note(self) -> str:
        """Sentence for the user that counts the new tokens by the origin of their weights."""
        unknown = self.old_ids.count([])
        divided = len(self.old_ids) - self.copied - unknown
        return (
            f"new vocabulary of {len(self.old_ids):,} tokens: {self.copied:,} have the weights of the same token, "
            f"{divided:,} the mean of the tokens of their text, {unknown:,} the mean of all tokens"
        )

    def apply(self, rows: Tensor) -> Tensor:
        """Compute the new vocabulary's rows, [new tokens, ...], from the old vocabulary's `rows`, [old tokens, ...]."""
        mean_of_all = rows.float().mean(0)
        means = [rows[ids].float().mean(0) if ids else mean_of_all for ids in self.old_ids]
        return torch.stack(means).to(rows.dtype)


def map_vocabulary(old: Tokenizer, new: Tokenizer) -> VocabularyMap:
    """Return the old tokens from which the weights of each new token are computed."""
    # Parts of characters, of which byte-level vocabularies have hundreds, have no text; their token strings differ.
    is_same_kind = _kind(old.backend) == _kind(new.backend)
    name: Callable[[Backend], Sequence[object]] = _token_strings if is_same_kind else _surfaces
    known = {key: token for token, key in enumerate(name(old.backend)) if token not in old.special_ids}
    new_names = name(new.backend)
    roles = {token: old.special_tokens[role] for role, token in new.special_tokens.items()}
    surfaces = _surfaces(new.backend)
    # A word-piece tokenizer divides words, so it needs no space before the text.
    texts = [f" {text}" if begins_word else text for text, begins_word in surfaces]
    encoded = old.encode_batch(texts)
    old_ids, at, copied = [], 0, 0
    for token, (text, length) in enumerate(zip(texts, encoded.lengths.tolist(), strict=True)):
        ids = [number for number in encoded.ids[at : at + length].tolist() if number != old.unk_id]
        at += length
        same = roles.get(token, known.get(new_names[token]))
        copied += same is not None
        is_part = _REPLACEMENT in text or _BYTE.fullmatch(text.strip())
        old_ids.append([same] if same is not None else [] if is_part else ids)
    return VocabularyMap(old_ids, copied)


def _token_strings(backend: Backend) -> list[str]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _kind(backend: Backend) -> tuple[bool, str | None]:
    """Return (True if token strings are bytes, WordPiece's prefix for tokens that continue a word, else None)."""
    state = parse_json(backend.to_str())
    prefix = state["model"].get("continuing_subword_prefix") if state["model"]["type"] == "WordPiece" else None
    return '"ByteLevel"' in json.dumps(state["pre_tokenizer"]), prefix


def _surfaces(backend: Backend) -> list[tuple[str, bool]]:
    """Return (text, True if the token begins a word) for each token."""
    is_byte_level, prefix = _kind(backend)
    surfaces = []
    for token in _token_strings(backend):
        if prefix is not None:
            surfaces.append((token.removeprefix(prefix), not token.startswith(prefix)))
            continue
        text = decoders.ByteLevel().decode([token]) if is_byte_level else token.replace(_WORD_MARK, " ")
        surfaces.append((text.removeprefix(" "), text.startswith(" ")))
    return surfaces
