"""Training with a CUDA graph gives the losses of training without one, for each kind of layers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shared import write_corpus
from megatron_neobert.config.schema import DataConfig, ModelConfig, OptimizerConfig, Settings, TrainingConfig
from megatron_neobert.data.batches.batch import MicroBatch
from megatron_neobert.data.batches.corpora import open_phases
from megatron_neobert.errors import ConfigError
from megatron_neobert.model.kernels import check_hardware
from megatron_neobert.runtime import distributed
from megatron_neobert.training import cuda_graph
from megatron_neobert.training.setup import build_run
from megatron_neobert.training.step import train_step, validation_step

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu, needs_gpu]
ENGINE = {"transformer_impl": "transformer_engine"}
FP8 = {**ENGINE, "fp8_format": "hybrid", "fp8_recipe": "delayed"}
# Packed sequences per step; another number has another graph. Micro-batches have 5 to 52 documents, which are padded
# to 32 or 64.
BATCH_SIZES = (4, 4, 4, 4, 4, 4, 2, 2, 2)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    folder: Path = tmp_path_factory.mktemp("corpus")
    prefix, vocabulary = write_corpus(folder, documents=2048, median_tokens=14, longest=256, vocab_size=2000)
    built = Settings(
        model=ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=4, max_position_embeddings=256),
        data=DataConfig(data_path=(prefix,), tokenizer_model=vocabulary, seq_length=256, split="1", num_workers=0),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-3, lr_decay_style="constant", lr_warmup_iters=0),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=4, bf16=True, eval_iters=0),
    ).with_section("compute", cuda_graph_impl="full_iteration")
    distributed.initialize(built)
    yield built
    distributed.shut_down()


def train(settings: Settings, **compute: Any) -> list[float]:
    """Return the loss of each step and of its batch after the update, in nats per masked token."""
    settings = settings.with_section("compute", **compute)
    try:
        check_hardware(settings)
    except ConfigError as error:
        pytest.skip(str(error))
    run = build_run(settings, open_phases(settings), torch.device("cuda", torch.cuda.current_device()))
    losses = []
    for size, batches in zip(BATCH_SIZES, run.training_stream.rank_batches(), strict=False):
        step = replace(batches, micro_batches=batches.micro_batches[: size // 2])
        losses += [call(run, step).sums.mean_loss for call in (train_step, validation_step)]
    if run.graph is not None:
        run.graph.free()
    return losses


def copying_once() -> Callable[..., None]:
    """Return `copy_batch` for a test, which copies to each target only once."""
    copy, seen = cuda_graph.copy_batch, []

    def copy_first(batch: MicroBatch, target: MicroBatch) -> None:
        if not any(target is other for other in seen):
            copy(batch, target)
            seen.append(target)

    return copy_first


@pytest.mark.parametrize(
    "layers", [{"transformer_impl": "local"}, ENGINE, FP8, {**ENGINE, "recompute_granularity": "full"}]
)
def test_graph_gives_the_losses_of_single_launches(settings, layers, monkeypatch):
    expected = train(settings, cuda_graph_impl="none", **layers)
    losses = train(settings, **layers)
    print("graph", layers, expected, losses)
    assert losses == pytest.approx(expected, rel=2e-3)  # equal on an H200
    monkeypatch.setattr(cuda_graph, "copy_batch", copying_once())
    assert train(settings, **layers) != pytest.approx(expected, rel=2e-3), "control: steps repeat the first batch"
