"""From a Hugging Face folder to a checkpoint that training continues from, compared with the model it was made of.

The folder is read by our own rules and nothing in it is executed. The checkpoint is read back from disk and run
against the folder's model before it gets its name.
"""

from pathlib import Path

import torch

from checkpoint_conversion.hf_model import build_logit_model
from checkpoint_conversion.hf_reader import ImportedModel, read_folder
from checkpoint_conversion.mapping import TABLES, to_internal
from checkpoint_conversion.megatron_reader import model_shape, read_checkpoint
from checkpoint_conversion.megatron_writer import write_checkpoint
from checkpoint_conversion.model_card import read_declared
from checkpoint_conversion.output_folder import build_folder
from checkpoint_conversion.verification import Checks, checkpoint_model, verify
from megatron_neobert.config.schema import Settings


def import_folder(
    folder: Path,
    output: Path,
    *,
    verified: bool = True,
    drop_padding: bool = False,
    license: str | None = None,
    base_model: str | None = None,
) -> tuple[ImportedModel, Checks]:
    """Writes and verifies the checkpoint.

    Args:
        drop_padding: As `read_folder`.
        license: Of the weights; by default as the folder's README.md has it.
        base_model: The weights' name on the Hub; by default as a cache of the Hub or the folder's README.md has it.

    Returns:
        What was read, and how far the checkpoint's model is from the folder's (empty if that was not wanted).

    Raises:
        OutputError: The output exists, or cannot be created.
        MissingInputError, ConversionError: The folder cannot be used. Nothing is left behind.
    """
    imported = read_folder(folder, drop_padding=drop_padding)
    declared = read_declared(folder) | {
        name: value for name, value in (("license", license), ("base_model", base_model)) if value
    }
    settings = Settings(model=imported.model)
    shape = model_shape(settings, vocab_size=imported.tokenizer.vocab_size)
    tensors = to_internal(imported.weights, shape, TABLES[imported.layout])
    with build_folder(output) as temporary:
        write_checkpoint(temporary, tensors, imported.model, imported.tokenizer, declared=declared)
        checks = _verify_import(imported, temporary) if verified else {}
    return imported, checks


def _verify_import(imported: ImportedModel, save: Path) -> Checks:
    written = checkpoint_model(read_checkpoint(save))
    source = build_logit_model(imported.folder, imported.layout, imported.weights)
    return verify(source, lambda precision: written, stored=torch.float32, what="the written checkpoint")
