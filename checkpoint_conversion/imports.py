"""A Hugging Face folder as data: settings, tokenizer, and weights under the names of a table in mapping.py.

Nothing of the folder is run, and no class of transformers takes part. Every tensor in the files is used exactly once,
or left out with a note. What NeoBERT has and a folder leaves to a rule (a decoder tied to the embedding, biases that
are not there) is filled in, with a note as well.

Weights are mapped from their files: headers are compared with the settings before any value is read, and nothing is
allocated for a size that a header only claims. Pickled weights are refused unread.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_conversion.checkpoint import model_shape, read_checkpoint, write_checkpoint
from checkpoint_conversion.config_json import FolderConfig, read_model_config
from checkpoint_conversion.mapping import HEAD_FOLDER, STRIP_PADDING, TABLES, ModelShape, published_shapes, to_internal
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.huggingface.checks import INDEX, WEIGHTS, check_folder, quote, quote_names, read_weight_map
from megatron_neobert.runtime.atomic_files import build_folder

if TYPE_CHECKING:  # its module imports transformers: seconds, which an import without verification does not need
    from checkpoint_conversion.compare import Checks, LogitModel

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEFTOVERS = ("rotary_emb.inv_freq", "freqs_cis")  # tables that older code stored; they follow from the rotary base


@dataclass(frozen=True)
class ImportedModel:
    """A published model that training can continue from."""

    layout: str  # a name in mapping.TABLES
    model: ModelConfig
    tokenizer: Tokenizer
    weights: dict[str, Tensor]  # fp32 or bf16, complete under the layout's published names
    notes: tuple[str, ...]  # what was left out or filled in


def import_folder(folder: Path, output: Path, *, verified: bool = True) -> "tuple[ImportedModel, Checks]":
    """Write a checkpoint of a folder's model, and verify it.

    Returns:
        What was read, and the distance of the checkpoint's model from the folder's (empty if it was not verified).

    Raises:
        OutputError: The output exists, or cannot be created.
        MissingInputError, ConversionError: The folder cannot be used. Nothing is left behind.
    """
    imported = read_folder(folder)
    shape = model_shape(Settings(model=imported.model), vocab_size=imported.tokenizer.vocab_size)
    tensors = to_internal(imported.weights, shape, TABLES[imported.layout])
    checks: Checks = {}
    with build_folder(output) as temporary:
        write_checkpoint(temporary, tensors, imported.model, imported.tokenizer)
        if verified:
            from checkpoint_conversion.compare import build_logit_model, checkpoint_model, verify

            written = checkpoint_model(read_checkpoint(temporary))
            source = build_logit_model(folder, imported.layout, imported.weights)
            checks = verify(source, lambda _: written, stored=torch.float32, what="the written checkpoint")
    return imported, checks


def load_as_read(folder: Path) -> "LogitModel":
    """Return the model of a folder in fp32, with the weights as conversion reads them.

    Raises:
        MissingInputError, ConversionError: As `read_weights` and `compare.load_model`.
    """
    from checkpoint_conversion.compare import build_logit_model

    parsed = read_model_config(check_folder(folder), folder / "config.json")
    return build_logit_model(folder, parsed.layout, read_weights(folder, parsed)[0])


def read_folder(folder: Path) -> ImportedModel:
    """Read a folder in EuroBERT's, NeoBERT's or the bidirectional Llama's layout.

    Rows of zeros that pad the vocabulary behind the tokenizer's last id are dropped.

    Raises:
        MissingInputError: There is no such folder, or no config, tokenizer or weights in it.
        ConversionError: It holds something that NeoBERT's layers cannot compute, or its files do not fit together.
        DataError: The tokenizer cannot be used.
    """
    content = check_folder(folder)
    config = read_model_config(content, folder / "config.json")
    try:
        tokenizer = load_tokenizer(folder)
    except MissingInputError as error:
        raise MissingInputError(
            f"{folder} holds no tokenizer; put the tokenizer.json or vocab.txt into it that the model was trained with."
        ) from error
    ids, rows = tokenizer.vocab_size, config.vocab_size
    if ids > rows:
        raise ConversionError(
            f"{folder}: the tokenizer has {ids} ids and the embedding {rows} rows (vocab_size of config.json); every "
            "id needs a row. The tokenizer belongs to another model."
        )
    if (stated := content.get("mask_token_id")) not in (None, tokenizer.mask_id):
        print(
            f"warning: {folder}: the tokenizer's [MASK] is id {tokenizer.mask_id}, and mask_token_id of config.json is "
            f"{quote(stated)}; training uses the tokenizer's.",
            file=sys.stderr,
        )
    weights, notes = read_weights(folder, config)
    if ids < rows:
        for name in (name for row in TABLES[config.layout] if row.rule is STRIP_PADDING for name in row.published):
            if weights[name][ids:].any():
                raise ConversionError(
                    f"{folder}: the tokenizer has {ids} ids and the embedding {rows} rows, and {name} is not zero in "
                    "the rows behind the last id: they would take part in every prediction. Give the tokenizer a "
                    "placeholder for each of them."
                )
            weights[name] = weights[name][:ids].clone()
        notes.append(f"dropped {rows - ids} rows of zeros, for which the tokenizer has no ids, from the vocabulary")
    return ImportedModel(config.layout, config.model, tokenizer, weights, (*config.notes, *notes))


# --- weights


def read_weights(folder: Path, config: FolderConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Read the weights that the folder's config.json describes.

    Returns:
        The tensors under the layout's published names, and notes on what was left out or filled in.

    Raises:
        MissingInputError: There are no weights.
        ConversionError: The weights are not those of the config, or there is no masked-language-model head.
    """
    stored = map_weights(folder, config.layout)
    if config.model.num_layers > len(stored):  # before names are made for each of these
        raise ConversionError(
            f"{folder}: config.json has num_hidden_layers {config.model.num_layers:,}, but the files hold "
            f"{len(stored):,} tensors, fewer than layers; fetch the folder again."
        )
    shape = ModelShape(config.model, config.vocab_size, config.vocab_size)
    shapes = published_shapes(TABLES[config.layout], shape)
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(_LEFTOVERS)}
    notes = []
    if left_out := [name for name in stored if name not in tensors]:
        notes.append(f"left out {quote_names(left_out)}: rotary angles follow from the base")
    embedding, decoder = (TABLES[config.layout][row].published[0] for row in (0, -2))
    zero = find_zero_biases(folder, config, tensors, shapes, decoder=decoder)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ConversionError(
                f"{folder}: {quote(name)} is stored as {tensor.dtype}; only {', '.join(map(str, _DTYPES))} are kept "
                "exactly. Save the weights as float32."
            )
        if tensor.shape != shapes[name]:
            raise ConversionError(
                f"{folder}: {quote(name)} has shape {tuple(tensor.shape)}; the sizes in config.json give it "
                f"{shapes[name]}. One of the files belongs to another model."
            )
    # Exactly: nothing here stores float16.
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if tensor.dtype == torch.float16}
    if config.tied:
        own = tensors.get(decoder)
        if own is not None and (differing := int((own != tensors[embedding]).sum())):
            raise ConversionError(
                f"{folder}: config.json has tie_word_embeddings true, but {decoder} differs from the embedding in "
                f"{differing:,} of {own.numel():,} values; set it to false, or remove the tensor."
            )
        notes.append(f"{decoder} is a copy of the embedding; training does not keep them equal")
        tensors[decoder] = tensors[embedding].clone()
    if zero:
        notes.append(f"filled with zeros, as the files lack them: {quote_names(zero)}")
        tensors |= {name: tensors[embedding].new_zeros(shapes[name]) for name in zero}
    return tensors, notes


def find_zero_biases(
    folder: Path, config: FolderConfig, tensors: Mapping[str, Tensor], shapes: Mapping[str, Any], *, decoder: str
) -> list[str]:
    """Return the biases that no file holds and that are zeros; `decoder` is the published name of the head's weight.

    Raises:
        ConversionError: The files lack something else, or hold what the model has not.
    """
    biases = [name for name in shapes if name.endswith(".bias") and not config.has_biases]
    if config.layout == "eurobert" and (ignored := [name for name in biases if name in tensors]):
        raise ConversionError(
            f"{folder}: config.json has mlp_bias false, but the files hold {quote_names(ignored)}, which transformers "
            "would ignore; set it to true, or remove them."
        )
    optional = [*biases, decoder] if config.tied else biases
    missing = [name for name in shapes if name not in tensors and name not in optional]
    unknown = [name for name in tensors if name not in shapes]
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
    return [name for name in biases if name not in tensors]


# --- files


def map_weights(folder: Path, layout: str) -> dict[str, Tensor]:
    """Map the tensors of model.safetensors, or of the files that its index names.

    Of a llama folder the head beside the encoder is mapped as well.

    Raises:
        MissingInputError: There are no weights, or a file that the index names is not there.
        ConversionError: The weights are pickled, a file is damaged, or index and files do not agree.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise ConversionError(f"{folder}: {WEIGHTS} and {INDEX} are both there; remove what is left of another model.")
    if single.is_file():
        tensors = map_file(single)
    elif index.is_file():
        tensors = map_shards(folder, read_weight_map(index))
    elif pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ConversionError(
            f"{folder}: the weights are pickled ({quote(pickles[0])}), and a pickle can run code. Load them where you "
            f"trust them (torch.load with weights_only=True), and save the state dict as {WEIGHTS} with safetensors."
        )
    else:
        raise MissingInputError(f"{folder}: neither {WEIGHTS} nor {INDEX}; name a folder that holds weights.")
    if layout != "llama":
        return tensors
    if not (folder / HEAD_FOLDER / WEIGHTS).is_file():
        raise ConversionError(
            f"{folder}: there is no {HEAD_FOLDER}/{WEIGHTS}, so it holds no masked-language-model head (what Llama "
            "calls lm_head predicts the next token); pre-training continues only from a model with its own head."
        )
    head = map_file(folder / HEAD_FOLDER / WEIGHTS)
    if twice := sorted(tensors.keys() & head.keys()):
        raise ConversionError(f"{folder}: {quote(twice[0])} is in {HEAD_FOLDER} as well; remove one of them.")
    return tensors | head


def map_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    found = set()
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise MissingInputError(f"{folder / file}: no such file, but {INDEX} names it; fetch the folder again.")
        of_file = map_file(folder / file)
        found |= {(name, file) for name in of_file}
        tensors |= of_file
    if differing := sorted(found ^ set(weight_map.items())):
        name, file = differing[0]
        holds = "holds" if differing[0] in found else "does not hold"
        raise ConversionError(
            f"{folder / file} {holds} {quote(name)}; for that, {INDEX} names {quote(weight_map.get(name))}. One of the "
            "files belongs to another model: fetch the folder again."
        )
    return tensors


def map_file(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ConversionError(f"{file}: not a safetensors file ({error!s:.200}); fetch it again.") from error
