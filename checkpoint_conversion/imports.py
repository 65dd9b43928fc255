"""From a Hugging Face folder to a checkpoint that training continues from, compared with the model it was made of.

The folder is read by our own rules and nothing in it is executed. The checkpoint is read back from disk and run
against the folder's model before it gets its name.
"""

from pathlib import Path

import torch

from checkpoint_conversion.huggingface_model import build_logit_model
from checkpoint_conversion.huggingface_reader import ImportedModel, read_folder
from checkpoint_conversion.mapping import TABLES, to_internal
from checkpoint_conversion.megatron_reader import model_shape, read_checkpoint
from checkpoint_conversion.megatron_writer import write_checkpoint
from checkpoint_conversion.output_folder import build_folder
from checkpoint_conversion.verification import Checks, checkpoint_model, verify
from megatron_neobert.config import Settings


def import_folder(folder: Path, output: Path, *, verified: bool = True) -> tuple[ImportedModel, Checks]:
    """Writes and verifies the checkpoint.

    Returns:
        What was read, and how far the checkpoint's model is from the folder's (empty if that was not wanted).

    Raises:
        OutputError: The output exists, or cannot be created.
        MissingInputError, ConversionError: The folder cannot be used. Nothing is left behind.
    """
    imported = read_folder(folder)
    settings = Settings(model=imported.model)
    shape = model_shape(settings, vocab_size=imported.tokenizer.vocab_size)
    tensors = to_internal(imported.weights, shape, TABLES[imported.layout])
    with build_folder(output) as temporary:
        write_checkpoint(temporary, tensors, imported.model, imported.tokenizer)
        checks = _verify_import(imported, temporary) if verified else {}
    return imported, checks


def _verify_import(imported: ImportedModel, save: Path) -> Checks:
    written = checkpoint_model(read_checkpoint(save))
    source = build_logit_model(imported.folder, imported.layout, imported.weights)
    return verify(source, lambda precision: written, stored=torch.float32, what="the written checkpoint")
