"""The plan of --dry-run against Megatron's scheduler, real batches, and formulas one can read here."""

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from tests_tiny import tiny_settings

from megatron_neobert import distributed
from megatron_neobert.config import CheckpointConfig, Settings
from megatron_neobert.data.inputs import open_inputs
from megatron_neobert.training.build import build_run, join
from megatron_neobert.training.checkpoint_files import MANIFEST
from megatron_neobert.training.flops import training_flops_per_token
from megatron_neobert.training.gpus import find_gpu
from megatron_neobert.training.metrics_line import duration
from megatron_neobert.training.plan import print_plan
from megatron_neobert.training.plan_costs import kept_checkpoints
from megatron_neobert.training.plan_data import sample_iteration
from megatron_neobert.training.plan_schedule import draw_curve, learning_rate

# ---- the learning rate


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_learning_rate_is_megatrons_at_every_iteration(style, warmup):
    settings = Settings().with_section("optimizer", lr_decay_style=style, lr_warmup_iters=warmup)
    settings = settings.with_section("training", train_iters=60)  # the decay ends at 54
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    cfg = settings.optimizer
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, cfg.lr, cfg.min_lr, warmup, settings.lr_decay_end, style, 0.0, 0.0, 60, "constant"
    )
    for iteration in range(60):
        (group,) = optimizer.param_groups
        assert learning_rate(settings, iteration) == pytest.approx(group["lr"], abs=1e-15), iteration
        scheduler.step(increment=1)


def test_curve_is_as_high_as_its_values():
    assert draw_curve([0, 1, 2, 4], height=2, unicode=True) == ["   █", " ▄██"]
    assert draw_curve([0, 1, 2, 4], height=2, unicode=False) == ["   #", " ###"]


# ---- what an iteration reads


@pytest.fixture
def no_process_group_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        distributed.shut_down()


@pytest.mark.parametrize("long_documents", ["truncate", "chunk"])
def test_sample_counts_what_the_first_iteration_trains_on(long_documents, tiny_corpus, no_process_group_left):
    settings = tiny_settings(tiny_corpus, data={"seq_length": 64, "long_documents": long_documents})
    sample = sample_iteration(settings, open_inputs(settings.data))
    run = build_run(settings, *join(settings))
    batches = next(run.training_stream.steps())
    assert sample.tokens == batches.real_tokens
    assert sample.fill == batches.real_tokens / (8 * 64)
    pieces = [int((batch.tokens_t == run.tokenizer.cls_id).sum()) for batch in batches.micro_batches]
    # A document that is cut into several begins once, and may have begun in a later row than its second piece.
    assert (sample.documents == sum(pieces)) == (long_documents == "truncate")
    lengths = [n for batch in batches.micro_batches for n in batch.cu_seqlens_n.diff().tolist()]
    unused = 8 * 64 - batches.real_tokens
    squares = sum(length**2 for length in lengths)
    assert squares - unused**2 <= sample.tokens_of_a_tokens_document * sample.tokens <= squares


def test_epochs_are_documents_over_those_for_training(tiny_corpus):
    """600 documents, of which 99 % are for training; two components of one corpus share the rows 3 to 1."""
    settings = tiny_settings(tiny_corpus)
    sample = sample_iteration(settings, open_inputs(settings.data))
    assert sample.epochs == (sample.documents / 594,)
    blend = tiny_settings(
        tiny_corpus, data={"data_path": ("0.75", f"{tiny_corpus.prefix}", "0.25", f"{tiny_corpus.prefix}:min=20")}
    )
    sample = sample_iteration(blend, open_inputs(blend.data))
    assert len(sample.epochs) == 2
    assert sample.epochs[0] * 594 > sample.epochs[1] * 594 / 2 > 0


# ---- checkpoints


@pytest.mark.parametrize(
    ("keep", "expected"),
    [({}, 100), ({"keep_last": 3}, 4), ({"keep_last": 3, "keep_every": 100}, 4 + 10), ({"keep_last": 500}, 100)],
    ids=["all", "last", "last-and-every", "more-than-there-are"],
)
def test_checkpoints_on_disk_are_those_kept_and_the_one_being_written(keep, expected):
    settings = Settings(checkpoint=CheckpointConfig(save="runs", save_interval=10, **keep))
    settings = settings.with_section("training", train_iters=1000)
    assert kept_checkpoints(settings, iterations=1000) == expected


# ---- the page


def plan_of(settings: Settings, capsys: Any, *, world_size: int = 1) -> str:
    assert print_plan(settings, world_size=world_size) == 0
    return str(capsys.readouterr().out)


def test_plan_says_what_differs_from_the_defaults_and_nothing_else(tiny_corpus, capsys):
    plan = " ".join(plan_of(tiny_settings(tiny_corpus, training={"bf16": True}), capsys).split())
    settings = plan[: plan.index(" model parameters")]
    assert "--bf16" in settings
    assert "--hidden-size 64" in settings
    assert "--mask-prob" not in settings
    assert "--no-bf16" not in settings


def test_time_on_a_gpu_is_the_models_operations_over_the_stated_rate(tiny_corpus, capsys):
    settings = tiny_settings(tiny_corpus, training={"bf16": True, "train_iters": 10**9})
    sample = sample_iteration(settings, open_inputs(settings.data))
    flops = training_flops_per_token(
        settings, vocab_size=tiny_corpus.vocab_size, document_tokens=sample.tokens_of_a_tokens_document
    )
    gpu = find_gpu("NVIDIA H200")
    assert gpu is not None
    seconds = flops * sample.tokens * 10**9 / (2 * gpu.bf16_tflops * 1e12 * 0.4)  # two ranks, 40 % MFU
    (line,) = [line for line in plan_of(settings, capsys, world_size=2).splitlines() if " H200 " in line]
    assert duration(seconds) in line
    assert "fits" in line


def test_plan_says_what_does_not_fit(tiny_corpus, tmp_path, capsys):
    settings = tiny_settings(tiny_corpus, save=tmp_path / "run", training={"train_iters": 10**9})
    plan = " ".join(plan_of(settings, capsys).split())
    assert "warning: no room for more than" in plan
    assert "Add --keep-last 2" in plan
    assert "does not fit" not in plan
    kept = settings.with_section("checkpoint", keep_last=2)
    assert "warning" not in plan_of(kept, capsys)
    huge = kept.with_section("training", micro_batch_size=2**20, global_batch_size=2**20)
    assert "does not fit" in plan_of(huge.with_section("data", seq_length=8), capsys)


def test_plan_goes_on_from_the_newest_checkpoint(tiny_corpus, tmp_path, capsys):
    checkpoint = tmp_path / "iter_0000004"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).touch()
    settings = tiny_settings(tiny_corpus, checkpoint={"continue_from": str(tmp_path)})
    assert "6 iterations, 4 of them done" in plan_of(settings, capsys)
    assert "done" not in plan_of(tiny_settings(tiny_corpus), capsys)


def test_plan_is_plain_where_the_terminal_is(tiny_corpus, monkeypatch):
    for encoding in ("ascii", "utf-8"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        print_plan(tiny_settings(tiny_corpus), world_size=1)
        stream.seek(0)
        assert ("█" in stream.read()) == (encoding == "utf-8")
