"""The tiny model that tests train, 2 layers x 64, rows of 128 tokens, 8 rows per iteration; and corpora for it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from json_files import write_jsonl

from megatron_neobert.config.schema import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    Settings,
    TrainingConfig,
)

ITERATIONS = 6


def tiny_settings(corpus: Any, *, save: Path | None = None, **sections: dict[str, Any]) -> Settings:
    """Settings of a run of six iterations; keyword arguments are `section={field: value}`."""
    settings = Settings(
        model=ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=128),
        data=DataConfig(data_path=(corpus.prefix,), tokenizer_model=corpus.tokenizer, seq_length=128, num_workers=0),
        optimizer=OptimizerConfig(lr=2e-3, min_lr=2e-4, lr_warmup_iters=1),
        training=TrainingConfig(
            micro_batch_size=2, global_batch_size=8, train_iters=ITERATIONS, eval_iters=1, eval_interval=ITERATIONS
        ),
        checkpoint=CheckpointConfig(save=str(save) if save else None, save_interval=1000),
        logging=LoggingConfig(log_interval=1),
    )
    for name, changes in sections.items():
        settings = settings.with_section(name, **changes)
    return settings


class TinyCorpus(NamedTuple):
    """A corpus and the tokenizer it was written with."""

    prefix: str
    tokenizer: str
    vocab_size: int


def made_up_texts(count: int, *, letters: str = "abcdefghij") -> list[str]:
    """Return texts of 5 to 60 words out of 300, the same in every call."""
    rng = random.Random(0)
    words = ["".join(rng.choices(letters, k=rng.randint(2, 7))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(count)]


def build_corpus(folder: Path, texts: Sequence[str], *, name: str, vocab_size: int) -> TinyCorpus:
    """Written by the real tools, with a tokenizer learned from the texts."""
    from megatron_neobert.data.preprocessing.run import PreprocessSettings, plan_preprocessing, preprocess
    from megatron_neobert.data.tokenizer.tokenizer import train_wordpiece

    shard = write_jsonl(folder / "shard.jsonl", ({"content": text} for text in texts))
    tokenizer = train_wordpiece(texts, vocab_size=vocab_size, lowercase=True, min_frequency=2)
    tokenizer.save_tokenizer_files(folder / "tokenizer", model_max_length=512)
    settings = PreprocessSettings(
        inputs=(str(shard),), output_prefix=str(folder / name), tokenizer_model=str(folder / "tokenizer")
    )
    preprocess(plan_preprocessing(settings))
    return TinyCorpus(str(folder / f"{name}_content_document"), str(folder / "tokenizer"), tokenizer.vocab_size)
