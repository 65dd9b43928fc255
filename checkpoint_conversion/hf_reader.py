"""A Hugging Face folder as data: settings, tokenizer, and weights under the names of a table in mapping.py.

Nothing of the folder is run, and transformers takes no part. hf_config.py reads the settings,
hf_weights.py the weights; here they are brought together with the tokenizer.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from checkpoint_conversion.hf_config import FolderConfig, read_model_config
from checkpoint_conversion.hf_folder import check_folder, quote
from checkpoint_conversion.hf_weights import Weights, read_weights
from checkpoint_conversion.mapping import TABLES
from checkpoint_conversion.tensor_rules import STRIP_PADDING
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConversionError, MissingInputError


@dataclass(frozen=True)
class ImportedModel:
    """A published model that training can go on from."""

    folder: Path
    layout: str  # of mapping.TABLES
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
    tokenizer = _read_tokenizer(folder, config, may_be_padded=drop_padding)
    weights = read_weights(folder, config)
    cut = _drop_padding(folder, weights, tokenizer.vocab_size) if config.vocab_size > tokenizer.vocab_size else []
    return ImportedModel(
        folder=folder,
        layout=weights.layout,
        model=config.model,
        tokenizer=tokenizer,
        weights=weights.tensors,
        notes=(*config.notes, *_compare_mask(config, tokenizer), *weights.notes, *cut),
    )


def _drop_padding(folder: Path, weights: Weights, vocab_size: int) -> list[str]:
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


def _compare_mask(config: FolderConfig, tokenizer: Tokenizer) -> list[str]:
    """A note where the config names another mask token; what text is masked with is the tokenizer's business."""
    stated, used = config.mask_token_id, tokenizer.mask_id
    if stated in (None, used):
        return []
    return [f"mask_token_id {quote(stated)} of config.json is not kept: the tokenizer's mask token is {used}"]
