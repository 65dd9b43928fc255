"""From a Hugging Face folder to a checkpoint that training continues from, compared with the model it was made of.

The folder is read by our own rules and nothing in it is executed. The checkpoint is read back from disk and run
against the folder's model before it gets its name.
"""

from pathlib import Path

import torch
from torch import Tensor

from checkpoint_conversion.comparison import LogitModel
from checkpoint_conversion.huggingface_model import load_logit_model
from checkpoint_conversion.huggingface_reader import ImportedModel, read_folder
from checkpoint_conversion.mapping import TABLES, to_internal
from checkpoint_conversion.megatron_reader import model_shape, read_checkpoint, reference_config
from checkpoint_conversion.megatron_writer import write_checkpoint
from checkpoint_conversion.output_folder import build_folder
from checkpoint_conversion.verification import Checks, reference_model, verify
from megatron_neobert.config import Settings
from megatron_neobert.model.reference import ReferenceNeoBERT


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
    checkpoint = read_checkpoint(save)
    max_tokens = imported.model.max_position_embeddings
    written = reference_model(checkpoint.build_reference(torch.float32), max_tokens=max_tokens)
    source = _fork_model(imported) if imported.layout == "neobert-unpacked" else load_logit_model(imported.folder)
    return verify(source, lambda precision: written, stored=torch.float32, what="the written checkpoint")


def _fork_model(imported: ImportedModel) -> LogitModel:
    """The fork's function without its code: the reference, once both halves of the feed-forward are joined."""
    weights: dict[str, Tensor] = dict(imported.weights)
    for gate in [name for name in weights if name.endswith(".ffn.w1.weight")]:
        up = gate.replace(".w1.", ".w2.")
        weights[gate.replace(".w1.", ".w12.")] = torch.cat((weights.pop(gate), weights.pop(up)))
    config = reference_config(Settings(model=imported.model), vocab_size=imported.tokenizer.vocab_size)
    with torch.device("meta"):
        reference = ReferenceNeoBERT(config)
    reference.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
    return reference_model(reference.eval(), max_tokens=imported.model.max_position_embeddings)
