"""Checkpoints of training as conversion reads and writes them: one process, no Megatron model, any layout of ranks.

The weights are read in fp32, as the optimizer updates them, even where training computes with their rounding; the rest
of the optimizer's state is left where it is. Reading costs the memory of the weights and the time to check every file
of the checkpoint against its manifest. What is written holds what a conversion knows, weights, settings of the model
and tokenizer, for --continue-from: training starts with fresh moments at iteration 0.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint_conversion.mapping import (
    LAYERS_PREFIX,
    NEOBERT,
    ModelShape,
    join_halves,
    split_halves,
    to_published,
)
from megatron_neobert.checkpoint.contents import (
    OPTIMIZER_PREFIX,
    StoredTensors,
    read_train_state,
    write_tensors,
    write_train_state,
)
from megatron_neobert.checkpoint.folder import (
    iteration_folder,
    latest_checkpoint,
    publish,
    verify_files,
    write_manifest,
)
from megatron_neobert.config.cli import read_record, write_record
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import CheckpointError, ConversionError
from megatron_neobert.model.reference import ReferenceConfig, ReferenceNeoBERT
from megatron_neobert.state import TrainState

_LAYER_SETTINGS = ("swiglu", "normalization", "position_embedding_type")

# What megatron.core calls the optimizer's own fp32 copies with its distributed optimizer, and without.
_STATE, _MAIN_WEIGHTS = f"{OPTIMIZER_PREFIX}state.", ("param", "fp32_param")


@dataclass(frozen=True)
class MegatronCheckpoint:
    """One saved iteration: its settings, its tokenizer, and its weights under the internal names of mapping.py."""

    folder: Path
    settings: Settings
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]
    progress: TrainState  # how far the run had come

    @property
    def iteration(self) -> int:
        return int(self.folder.name.removeprefix("iter_"))

    @property
    def shape(self) -> ModelShape:
        return model_shape(self.settings, vocab_size=self.tokenizer.vocab_size)

    @property
    def trained_length(self) -> int:
        """Sequence length of the last iteration; the model's context length if conversion wrote the checkpoint."""
        longest = self.settings.model.max_position_embeddings
        return (
            min(phase_at(self.settings, self.iteration).settings.data.seq_length, longest)
            if self.iteration
            else longest
        )

    def build_reference(self, dtype: torch.dtype) -> ReferenceNeoBERT:
        """Return the same function in plain PyTorch and fp32, its weights rounded to `dtype` first.

        Raises:
            ConversionError: The weights are not those of the settings.
        """
        rounded = {name: tensor.to(dtype).float() for name, tensor in self.tensors.items()}
        published = to_published(rounded, self.shape, NEOBERT)  # first: a record can ask for a model of any size
        with torch.device("meta"):  # no time spent on weights that are replaced at once
            reference = ReferenceNeoBERT(reference_config(self.settings, vocab_size=self.tokenizer.vocab_size))
        reference.load_state_dict(published, assign=True)
        return reference.eval()


def model_shape(settings: Settings, *, vocab_size: int) -> ModelShape:
    """Return the sizes that the settings give every tensor of a run with a tokenizer of `vocab_size` tokens."""
    model, ranks = settings.model, settings.parallel.tensor_model_parallel_size
    padded = model.padded_vocab_size(vocab_size, tensor_parallel=ranks)
    return ModelShape(model, vocab_size, padded)


def reference_config(settings: Settings, *, vocab_size: int) -> ReferenceConfig:
    """Return the settings of the reference model of a run."""
    model = settings.model
    return ReferenceConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_width,
        vocab_size=vocab_size,
        rotary_base=model.rotary_base,
        norm_epsilon=model.norm_epsilon,
        init_method_range=model.init_method_range,
    )


def read_checkpoint(save: Path, *, iteration: int | None = None) -> MegatronCheckpoint:
    """Read the newest checkpoint of a save folder, or that of one iteration.

    Raises:
        MissingInputError: There is none.
        CheckpointError: The checkpoint is damaged or incomplete.
        ConversionError: Its layers are not NeoBERT's.
    """
    folder = latest_checkpoint(save, iteration=iteration)
    verify_files(folder)
    settings = read_record(folder / "settings.yaml")
    if not settings.model.is_neobert:
        found = [f"{name} {getattr(settings.model, name)}" for name in _LAYER_SETTINGS]
        raise ConversionError(
            f"{folder} was trained with {', '.join(found)}; the reference and every published layout have SwiGLU, "
            "RMSNorm and rotary positions. Convert a run with these; this checkpoint can only be trained further."
        )
    tensors = _read_tensors(folder)
    layers = {name.split(".")[2] for name in tensors if name.startswith(LAYERS_PREFIX)}
    if len(layers) != settings.model.num_layers:  # before names are made for each of these
        raise ConversionError(
            f"{folder} holds the tensors of {len(layers)} layers; settings.yaml has --num-layers "
            f"{settings.model.num_layers}. One of the files belongs to another checkpoint."
        )
    return MegatronCheckpoint(
        folder=folder,
        settings=settings,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        tensors=join_halves(tensors),
        progress=read_train_state(folder).state,
    )


def write_checkpoint(save: Path, tensors: dict[str, Tensor], model: ModelConfig, tokenizer: Tokenizer) -> Path:
    """Write iteration 0 of a save folder.

    Args:
        save: An existing folder.
        tensors: Under the internal names of mapping.py; stored in fp32.

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
    write_train_state(temporary, TrainState(corpus_sha256=""))
    write_record(Settings(model=model), temporary / "settings.yaml")
    tokenizer.save_tokenizer_files(temporary / "tokenizer", model_max_length=model.max_position_embeddings)
    write_manifest(temporary, {})
    publish(temporary, final)
    return final


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the model at its full size, under the names of the checkpoint.

    Where training computed with weights in less than fp32, these are the weights that the optimizer updates.
    """
    stored = StoredTensors(folder)
    names = [name for name in stored.shapes if not name.startswith(OPTIMIZER_PREFIX)]
    if not names:
        raise CheckpointError(f"{folder} holds no weights; use another checkpoint.")
    chosen = {}
    for name in names:
        copies = [] if stored.dtypes[name] is torch.float32 else [f"{_STATE}{kind}.{name}" for kind in _MAIN_WEIGHTS]
        found = (copy for copy in copies if stored.shapes.get(copy) == stored.shapes[name])
        chosen[name] = stored.read_whole(next(found, name))
    return chosen


def load_into_megatron(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy weights under the internal names of mapping.py into a Megatron model that no parallelism splits."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[stored_name(name)])


def stored_name(name: str) -> str:
    """Return the name of a parameter in a checkpoint, whichever classes the model is built of."""
    from megatron_neobert.model.transformer_config import NORM_NAMES  # megatron.core, which conversion does without

    for own, stored in NORM_NAMES.items():
        name = name.replace(own, stored)
    return name
