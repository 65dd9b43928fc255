"""A Hugging Face folder as data: settings, tokenizer, and weights under the names of a table in mapping.py.

Nothing of the folder is run, and transformers takes no part. huggingface_config.py reads the settings,
huggingface_weights.py the weights; here they are brought together with the tokenizer.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from checkpoint_conversion.huggingface_config import FolderConfig, read_model_config
from checkpoint_conversion.huggingface_folder import check_folder, quote
from checkpoint_conversion.huggingface_weights import read_weights
from megatron_neobert.config import ModelConfig
from megatron_neobert.data.tokenizer import Tokenizer, load_tokenizer
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


def read_folder(folder: Path) -> ImportedModel:
    """Reads a folder in EuroBERT's, NeoBERT's or the bidirectional Llama's layout.

    Raises:
        MissingInputError: There is no such folder, or no config, tokenizer or weights in it.
        ConversionError: It holds something that NeoBERT's layers cannot compute, or its files do not fit together.
        DataError: The tokenizer cannot be used.
    """
    config = read_model_config(check_folder(folder), folder / "config.json")
    tokenizer = _read_tokenizer(folder, config)
    weights = read_weights(folder, config)
    return ImportedModel(
        folder=folder,
        layout=weights.layout,
        model=config.model,
        tokenizer=tokenizer,
        weights=weights.tensors,
        notes=(*config.notes, *_compare_mask(config, tokenizer), *weights.notes),
    )


def _read_tokenizer(folder: Path, config: FolderConfig) -> Tokenizer:
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
    if ids < rows:
        raise ConversionError(
            f"{folder}: the tokenizer has {ids} ids and the embedding {rows} rows (vocab_size of config.json); rows "
            "that belong to no token would take part in every prediction. Cut the embedding and the decoder to the "
            "tokenizer's size, or give the tokenizer a placeholder for each of these rows."
        )
    return tokenizer


def _compare_mask(config: FolderConfig, tokenizer: Tokenizer) -> list[str]:
    """A note where the config names another mask token; what text is masked with is the tokenizer's business."""
    stated, used = config.mask_token_id, tokenizer.mask_id
    if stated in (None, used):
        return []
    return [f"mask_token_id {quote(stated)} of config.json is not kept: the tokenizer's mask token is {used}"]
