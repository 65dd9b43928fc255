"""Weights as a checkpoint that training goes on from with --continue-from: one process, no Megatron model.

It holds what a conversion knows: weights in fp32, the model's settings and the tokenizer. Optimizer state and a place
in the data are not there, so training starts with fresh moments at iteration 0; any layout of ranks can load it.
"""

import json
from pathlib import Path

from torch import Tensor

from checkpoint_conversion.mapping import split_halves
from checkpoint_conversion.megatron_reader import PROVENANCE
from megatron_neobert.checkpoint.folder import iteration_folder, publish, write_manifest
from megatron_neobert.checkpoint.tensors import write_tensors
from megatron_neobert.checkpoint.train_state import write_train_state
from megatron_neobert.config.cli import write_record
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.state import Progress


def write_checkpoint(
    save: Path, tensors: dict[str, Tensor], model: ModelConfig, tokenizer: Tokenizer, *, declared: dict[str, str]
) -> Path:
    """Writes iteration 0 of a save folder.

    Args:
        save: An existing folder.
        tensors: Under the internal names of mapping.py; stored in fp32.
        declared: The weights' licence and name on the Hub, for the model cards of what is made of them.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: It cannot be written.
    """
    final = iteration_folder(save, 0)
    temporary = save / f".tmp-{final.name}"
    temporary.mkdir()
    parts = split_halves({name: tensor.float() for name, tensor in tensors.items()})
    write_tensors(
        temporary / "rank_00000.safetensors", parts, {name: (0,) * tensor.dim() for name, tensor in parts.items()}
    )
    write_train_state(temporary, Progress(corpus_sha256=""))
    (temporary / PROVENANCE).write_text(json.dumps(declared), encoding="utf-8")
    write_record(Settings(model=model), temporary / "settings.yaml")
    tokenizer.save_tokenizer_files(temporary / "tokenizer", model_max_length=model.max_position_embeddings)
    write_manifest(temporary, {})
    publish(temporary, final, iteration=0)
    return final
