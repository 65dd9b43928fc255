"""Read and write training checkpoints for conversion, in one process, without a Megatron model, for any rank layout.

Weights are read in fp32, as the optimizer updates them, also where training computes in bfloat16. The rest of the
optimizer state is not read. Reading needs the memory of the weights and verifies every file against the manifest.
A written checkpoint has weights, model settings and a tokenizer. With --continue-from, training starts from it at
iteration 0 with new optimizer state.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint_conversion.mapping import NEOBERT, ModelShape, join_halves, split_halves, to_published
from megatron_neobert.checkpoint.contents import StoredTensors, write_tensors
from megatron_neobert.checkpoint.folder import (
    iteration_folder,
    iteration_of,
    latest_checkpoint,
    publish,
    verify_files,
    write_manifest,
)
from megatron_neobert.checkpoint.train_state import TrainState, read_train_state, write_train_state
from megatron_neobert.config.cli import read_record, write_record
from megatron_neobert.config.resume_rules import ReadCorpus
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import CheckpointError, ConversionError
from megatron_neobert.model.reference import ReferenceConfig, ReferenceNeoBERT

# Settings of the model that affect its function or its longest input. An exported model must equal its source in them.
COMPARED_SETTINGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_width",
    "max_position_embeddings",
    "rotary_base",
    "norm_epsilon",
)
# Values without which ReferenceNeoBERT and the published layouts compute another function.
_NEOBERT_LAYERS = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
# Settings without a part in an exported model, and the one that `ffn_width` compares.
_NOT_COMPARED = ("init_method_range", "ffn_hidden_size")


@dataclass(frozen=True)
class MegatronCheckpoint:
    """Content of one checkpoint. `tensors` maps the internal names of mapping.py to weights."""

    folder: Path
    settings: Settings
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]
    train_state: TrainState

    @property
    def iteration(self) -> int:
        return iteration_of(self.folder)

    @property
    def shape(self) -> ModelShape:
        return model_shape(self.settings, vocab_size=self.tokenizer.vocab_size)

    def build_reference(self, dtype: torch.dtype) -> ReferenceNeoBERT:
        """Return the model in plain PyTorch, in evaluation mode, with weights rounded to `dtype` and stored in fp32."""
        rounded = {name: tensor.to(dtype).float() for name, tensor in self.tensors.items()}
        # Checks the weights before a model is built, because settings.yaml can ask for a model of any size.
        published = to_published(rounded, self.shape, NEOBERT)
        with torch.device("meta"):  # these weights are replaced
            reference = ReferenceNeoBERT(reference_config(self.settings, vocab_size=self.tokenizer.vocab_size))
        reference.load_state_dict(published, assign=True)
        return reference.eval()


def model_shape(settings: Settings, *, vocab_size: int) -> ModelShape:
    """Return the shape of a run's model with a tokenizer of `vocab_size` tokens."""
    model, ranks = settings.model, settings.parallel.tensor_model_parallel_size
    padded = model.padded_vocab_size(vocab_size, tensor_parallel=ranks)
    return ModelShape(model, vocab_size, padded)


def reference_config(settings: Settings, *, vocab_size: int) -> ReferenceConfig:
    """Return the ReferenceConfig that is equivalent to a run's model settings, for `vocab_size` tokens.

    Raise ConversionError if the model's layers differ from NeoBERT's.
    """
    model = settings.model
    refuse_other_layers(model, "the model")
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


def refuse_other_layers(model: ModelConfig, source: str) -> None:
    """Raise ConversionError if the model's layers differ from the layers that ReferenceNeoBERT computes.

    Settings that this module does not list are refused, even with their default value.

    Args:
        source: Where the model comes from, for the message.
    """
    other = [
        f"{name} {value}"
        for name, value in vars(model).items()
        if name not in (*COMPARED_SETTINGS, *_NOT_COMPARED) and (name, value) not in _NEOBERT_LAYERS.items()
    ]
    if other:
        raise ConversionError(
            f"{source} has {', '.join(other)}, which no published layout has: they have SwiGLU, RMSNorm and rotary "
            "positions. Convert a run with these layers; a new setting must be known to "
            "checkpoint_conversion/checkpoint.py."
        )


def read_checkpoint(save: Path, *, iteration: int | None = None) -> MegatronCheckpoint:
    """Verify and read one checkpoint of a --save folder. If `iteration` is None, read the newest checkpoint.

    A weight that is stored in less than fp32 is replaced by its fp32 copy in the optimizer's state, if there is one.
    Raises ConversionError if the layers are not NeoBERT's or their number differs from the settings, and
    CheckpointError if the checkpoint contains no weights.
    """
    folder = latest_checkpoint(save, iteration=iteration)
    verify_files(folder)
    settings = read_record(folder / "settings.yaml")
    refuse_other_layers(settings.model, str(folder))
    stored = StoredTensors(folder)
    names = [name for name in stored.shapes if not name.startswith("optimizer.")]
    if not names:
        raise CheckpointError(f"{folder} has no weights; use another checkpoint.")
    numbers = {name.split(".")[2] for name in names if name.startswith("decoder.layers.")}
    # Checked before tables are expanded, because settings.yaml can ask for any number of layers.
    if len(numbers) != settings.model.num_layers:
        raise ConversionError(
            f"{folder} has tensors of {len(numbers)} layers, but settings.yaml has --num-layers "
            f"{settings.model.num_layers}. Use another checkpoint, or restore the file that was changed."
        )
    tensors = {
        name: stored.read_whole(name if stored.dtypes[name] is torch.float32 else stored.main_name(name))
        for name in names
    }
    return MegatronCheckpoint(
        folder=folder,
        settings=settings,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        tensors=join_halves(tensors),
        train_state=read_train_state(folder).state,
    )


def write_checkpoint(
    save: Path,
    tensors: dict[str, Tensor],
    model: ModelConfig,
    tokenizer: Tokenizer,
    *,
    read_corpora: tuple[ReadCorpus, ...] = (),
) -> Path:
    """Write a checkpoint of iteration 0 without optimizer state. Return its folder; replace an existing iteration 0.

    Args:
        save: Existing save folder.
        tensors: Weights under the internal names of mapping.py. They are stored in fp32.
        read_corpora: Corpora on which the weights were trained.
    """
    final = iteration_folder(save, 0)
    temporary = save / f".tmp-{final.name}"
    temporary.mkdir()
    stored = split_halves({name: tensor.float() for name, tensor in tensors.items()})
    write_tensors(temporary / "rank_00000.safetensors", stored)
    write_train_state(temporary, TrainState(corpus_sha256="", read_corpora=read_corpora))
    write_record(Settings(model=model), temporary / "settings.yaml")
    tokenizer.save_tokenizer_files(temporary / "tokenizer", model_max_length=model.max_position_embeddings)
    write_manifest(temporary, {})
    publish(temporary, final)
    return final


def load_into_megatron(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy `tensors`, keyed by the internal names of mapping.py, into a Megatron model that is not split over ranks."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[stored_name(name)])


def stored_name(name: str) -> str:
    """Return the name under which a checkpoint stores a Megatron parameter. Only norms of local layers are renamed."""
    # Imports megatron.core, which conversion does not need.
    from megatron_neobert.model.transformer_config import NORM_NAMES

    for local_name, checkpoint_name in NORM_NAMES.items():
        name = name.replace(local_name, checkpoint_name)
    return name
