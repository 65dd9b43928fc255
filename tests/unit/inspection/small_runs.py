"""Small corpora, one of whose tokens would act on a terminal, and settings and checkpoints of runs over them."""

import json
from pathlib import Path

from unit.data.small_corpus import random_documents, write_corpus, write_vocabulary

from megatron_neobert.config.cli import write_record
from megatron_neobert.config.schema import DataConfig, ModelConfig, OptimizerConfig, Settings, TrainingConfig
from megatron_neobert.data.batches.corpora import open_corpora
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

RED, REVERSED = "\x1b[31mred", "\u202edesrever"
VOCABULARY = [RED, REVERSED, "##ly", *(f"word{n}" for n in range(40))]
LENGTHS = [1 + 7 * number % 90 for number in range(200)]


def write_corpora(folder: Path) -> Path:
    """Write vocab.txt and the corpora P and Q; return the folder."""
    tokenizer = load_tokenizer(write_vocabulary(folder / "vocab.txt", VOCABULARY))
    for name, seed in (("P", 0), ("Q", 1)):
        write_corpus(folder / name, random_documents(LENGTHS, tokenizer.vocab_size, seed), tokenizer)
    return folder


def settings_of(corpora: Path, *, data_path: tuple[str, ...] | None = None, **data: object) -> Settings:
    """Return settings with 8 packed sequences of 64 tokens per iteration, 2 per micro-batch."""
    defaults = {"tokenizer_model": str(corpora / "vocab.txt"), "split": "100", "seq_length": 64}
    return Settings(
        model=ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4),
        data=DataConfig(**{"data_path": data_path or (str(corpora / "P"),), **defaults, **data}),
        optimizer=OptimizerConfig(lr_warmup_iters=1),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=100, eval_iters=0),
    )


def write_checkpoint(save: Path, settings: Settings, *, iteration: int, cursor: dict[str, object]) -> Path:
    """Write the files of a checkpoint that a batch needs: settings and train state."""
    folder = save / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    write_record(settings, folder / "settings.yaml")
    progress = {"corpus_sha256": open_corpora(settings.data).sha256, "iteration": iteration, "cursor": cursor}
    (folder / "train_state.json").write_text(json.dumps({"progress": progress, "optimizer_steps": iteration}))
    (folder / "MANIFEST.json").touch()
    return folder
