"""Weights as a checkpoint that training goes on from with --continue-from: one process, no Megatron model.

It holds what a conversion knows: weights in fp32, the model's settings and the tokenizer. Optimizer state and a place
in the data are not there, so training starts with fresh moments at iteration 0; any layout of ranks can load it.
"""

import io
import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from checkpoint_conversion.mapping import stack_layers
from checkpoint_conversion.megatron_reader import PROVENANCE
from megatron_neobert.config import ModelConfig, Settings
from megatron_neobert.data.tokenizer import Tokenizer
from megatron_neobert.flags import write_record
from megatron_neobert.training.checkpoint_files import iteration_folder, publish, write_manifest
from megatron_neobert.training.run import Progress
from megatron_neobert.training.safe_reading import FORMAT


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
    stacked = stack_layers({name: tensor.float() for name, tensor in tensors.items()})
    try:
        torch_checkpoint.save(stacked, checkpoint_id=temporary, no_dist=True)
    except CheckpointException as error:
        reason: BaseException | None = next(iter(error.failures.values()))[0]
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__context__
        if reason is None:
            raise
        raise reason from error
    common = io.BytesIO()  # for a failure to write is an OSError then
    torch.save({"progress": asdict(Progress(corpus_sha256=""))}, common)
    (temporary / "common.pt").write_bytes(common.getvalue())
    (temporary / "metadata.json").write_text(json.dumps(FORMAT), encoding="utf-8")
    (temporary / PROVENANCE).write_text(json.dumps(declared), encoding="utf-8")
    write_record(Settings(model=model), temporary / "settings.yaml")
    tokenizer.save_tokenizer_files(temporary / "tokenizer", model_max_length=model.max_position_embeddings)
    write_manifest(temporary, {})
    publish(temporary, final, iteration=0)
    return final
