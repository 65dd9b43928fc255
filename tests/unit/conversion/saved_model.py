"""A small training checkpoint, written without Megatron, and its model."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from json_files import edit_json
from torch import Tensor
from unit.data.small_corpus import SPECIAL, write_vocabulary

from checkpoint_conversion.checkpoint import read_checkpoint, reference_config
from checkpoint_conversion.compare import Checks, draw_large_weights
from checkpoint_conversion.export import export
from checkpoint_conversion.mapping import NEOBERT, ModelShape, split_halves, to_internal
from megatron_neobert.checkpoint.contents import write_tensors
from megatron_neobert.checkpoint.folder import write_manifest
from megatron_neobert.checkpoint.train_state import TrainState, write_train_state
from megatron_neobert.config.cli import write_record
from megatron_neobert.config.resume_rules import ReadCorpus
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.model.reference import ReferenceNeoBERT

WORDS = [*SPECIAL, "the", "cat", "sat", "on", "a", "mat", "##s", "."]
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=48,
    max_position_embeddings=64,
    rotary_base=5000,
)
SHAPE = ModelShape(MODEL, len(WORDS), MODEL.padded_vocab_size(len(WORDS), tensor_parallel=1))
READ = (ReadCorpus("0" * 64, seed=0, split="99,1"),)
TRAIN_STATE = TrainState("0" * 64, iteration=30, consumed_samples=240, consumed_tokens=9_000, read_corpora=READ)


@dataclass
class SavedModel:
    """A save folder with one checkpoint."""

    save: Path
    vocabulary: Path

    @property
    def iteration_folder(self) -> Path:
        return self.save / "iter_0000030"

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Replace the checkpoint by one with these weights, under the internal names."""
        folder = self.iteration_folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        stored = split_halves(tensors) | {"optimizer.state.exp_avg.output_layer.bias": torch.ones(3)}
        write_tensors(folder / "rank_00000.safetensors", stored)
        write_record(Settings(model=MODEL), folder / "settings.yaml")
        write_train_state(folder, TRAIN_STATE)
        load_tokenizer(self.vocabulary).save_tokenizer_files(folder / "tokenizer", model_max_length=64)
        self.seal()

    def record(self, settings: Settings) -> None:
        """Replace settings.yaml and the manifest."""
        write_record(settings, self.iteration_folder / "settings.yaml")
        self.seal()

    def seal(self) -> None:
        """Write a manifest of the present files."""
        (self.iteration_folder / "MANIFEST.json").unlink(missing_ok=True)
        write_manifest(self.iteration_folder, {})


def save_model(root: Path) -> SavedModel:
    vocabulary = write_vocabulary(root / "vocab.txt", WORDS[len(SPECIAL) :])
    model = SavedModel(save=root / "checkpoints", vocabulary=vocabulary)
    model.write(build_internal())
    (model.save / "latest_checkpointed_iteration.txt").write_text("30")
    return model


def build_reference() -> ReferenceNeoBERT:
    return draw_large_weights(ReferenceNeoBERT(reference_config(Settings(model=MODEL), vocab_size=len(WORDS))))


def build_internal() -> dict[str, Tensor]:
    """Return the weights of `build_reference` under the internal names."""
    return to_internal(build_reference().state_dict(), SHAPE, NEOBERT)


def convert(saved: SavedModel, output: Path, **options: Any) -> Checks:
    """Export the newest checkpoint; `options` are those of `export`."""
    return export(read_checkpoint(saved.save), output, **options)


def change_config(folder: Path, **fields: Any) -> None:
    edit_json(folder / "config.json", **fields)


def assert_nothing_written(folder: Path) -> None:
    assert [path.name for path in folder.iterdir() if path.name.startswith("model")] == []
