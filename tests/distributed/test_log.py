"""Logs of training runs: figures that do not depend on the layout, validation curves, a profile, and W&B."""

import gzip
import importlib.util
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import quick_only, read_metrics, train_on_ranks
from tests_tiny import tiny_settings

from megatron_neobert.data.batches.batch import RankPosition
from megatron_neobert.data.batches.corpora import open_phases
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.inspection.global_batch import rebuild_batch
from megatron_neobert.model.flops import training_flops_per_token
from megatron_neobert.training import loop

LAST = 3  # last iteration of all runs
GLOBAL_BATCH_SIZE, SEQ_LENGTH = 8, 128
LAYOUTS: dict[str, dict[str, Any]] = {
    "two replicas": {},
    "two tensor-parallel ranks": {"tensor_model_parallel_size": 2},
    "two stages": {"pipeline_model_parallel_size": 2},
    "two context-parallel ranks": {"context_parallel_size": 2},
}
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


@pytest.fixture(scope="module")
def build(tiny_corpus, tmp_path_factory):
    def build_settings(**sections: dict[str, Any]):
        folder = tmp_path_factory.mktemp("run")
        sections = {"training": {"train_iters": LAST, "eval_iters": 0}, **sections}
        return tiny_settings(tiny_corpus, save=folder, **sections)

    return build_settings


def before_each_step(act) -> None:
    """Call `act(run, batches)` before every step of this process."""
    original = loop.train_step

    def train_step(run, batches):
        act(run, batches)
        return original(run, batches)

    loop.train_step = train_step


@pytest.mark.parametrize("layout", quick_only(LAYOUTS, "two tensor-parallel ranks"))
def test_every_layout_logs_the_operations_and_packing_efficiency_of_its_documents(build, layout):
    run = build(parallel=LAYOUTS[layout])
    train_on_ranks(run, world_size=2)
    rates = read_metrics(run.checkpoint.save, "tokens_per_second_per_rank")
    operations = read_metrics(run.checkpoint.save, "tflops_per_rank")
    vocab_size = load_tokenizer(Path(run.data.tokenizer_model)).vocab_size
    phases = open_phases(run)
    batches = [rebuild_batch(run, phases, iteration, checkpoint=None) for iteration in range(1, LAST + 1)]
    batches = [batch.for_rank(RankPosition()) for batch in batches]
    for iteration, batch in enumerate(batches, start=1):
        pairs = sum(int((part.cu_seqlens_n.diff() ** 2).sum()) for part in batch.micro_batches)
        predicted = sum(int((part.labels_m >= 0).sum()) for part in batch.micro_batches)
        planned = training_flops_per_token(
            run,
            vocab_size=vocab_size,
            document_tokens=pairs / batch.real_tokens,
            predicted_share=predicted / batch.real_tokens,
        )
        assert operations[iteration] * 1e12 / rates[iteration] == pytest.approx(planned)
    efficiencies = read_metrics(run.checkpoint.save, "fill")
    capacity = GLOBAL_BATCH_SIZE * SEQ_LENGTH
    assert list(efficiencies.values()) == [batch.real_tokens / capacity for batch in batches]


def test_validation_curve_of_a_corpus_does_not_depend_on_other_corpora(build, tiny_corpus):
    def curves_of(*limits: str, suffixes: tuple[str, ...]) -> list[dict[int, float]]:
        data = {"valid_data_path": tuple(f"{tiny_corpus.prefix}:{limit}" for limit in limits)}
        run = build(training={"train_iters": LAST, "eval_interval": 2, "eval_iters": 2}, data=data)
        train_on_ranks(run, world_size=2)
        return [read_metrics(run.checkpoint.save, f"validation_loss{suffix}") for suffix in suffixes]

    names = [f"_tiny_content_document_{limit}" for limit in ("max_40", "min_41")]
    whole, short, long = curves_of("max=40", "min=41", suffixes=("", *names))
    assert [short] == curves_of("max=40", suffixes=("",))
    assert [long] == curves_of("min=41", suffixes=("",))
    assert list(short) == [2, 3]
    assert all(min(short[i], long[i]) < whole[i] < max(short[i], long[i]) for i in short)


def test_profile_is_a_trace_of_its_iterations_and_does_not_change_losses(build):
    plain, run = build(), build(logging={"profile": "2-3"})
    for each in (plain, run):
        train_on_ranks(each)
    (trace,) = Path(run.checkpoint.save, "profile").iterdir()
    assert trace.name == "iterations_2_to_3.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2
    assert "aten::mm" in names
    assert read_metrics(run.checkpoint.save) == read_metrics(plain.checkpoint.save)


@pytest.mark.parametrize(("slow", "ranks_per_machine"), [(1, 1), (2, 1), (2, 3)])
def test_log_names_the_rank_that_computes_slowest_of_several_machines(
    build, capfd, monkeypatch, slow, ranks_per_machine
):
    """The rank sleeps before its forward pass. The other ranks wait for it in the reduction of gradients."""

    def sleep(run, batches):
        if os.environ["RANK"] == str(slow):
            time.sleep(0.5)

    run = build(training={"train_iters": 6, "global_batch_size": 6, "eval_iters": 0})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_machine))
    train_on_ranks(run, world_size=3, prepare=lambda: before_each_step(sleep))
    slowest, leads = (read_metrics(run.checkpoint.save, key) for key in ("slowest_rank", "slowest_rank_lead"))
    # A line has the times of the step before it.
    assert list(slowest.items()) == [(iteration, slow) for iteration in range(2, 7)]
    assert min(leads.values()) > 0
    named = len(slowest) if ranks_per_machine < 3 else 0
    assert capfd.readouterr().out.count(f"\n  slowest rank {slow}, ") == named


def test_run_without_save_warns_once_at_its_start_and_once_at_its_end(build, capfd):
    train_on_ranks(build(checkpoint={"save": None, "load": None}), world_size=2)
    lines = [line for line in capfd.readouterr().out.splitlines() if re.match("training|iteration|warning", line)]
    warnings = [number for number, line in enumerate(lines) if "weights are lost" in line]
    assert warnings == [1, len(lines) - 1], lines


@needs_wandb
def test_resumed_run_continues_the_wandb_run_of_its_save_folder(build, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = build(logging={"wandb_project": "books"}, training={"train_iters": LAST, "eval_iters": 0, "exit_interval": 2})
    run = run.with_section("checkpoint", load=run.checkpoint.save)
    folder = Path(run.checkpoint.save)
    for _ in range(2):
        train_on_ranks(run)
    assert list(read_metrics(folder)) == [1, 2, 3]
    identity = (folder / "wandb_id.txt").read_text().strip()
    files = list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in files] == [f"run-{identity}.wandb"] * 2


@needs_wandb
def test_training_continues_after_wandb_was_killed(build, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")

    def kill(run, batches):
        if run.state.iteration == 1:
            for child in psutil.Process().children(recursive=True):
                if "wandb" in child.name():
                    child.send_signal(signal.SIGKILL)
                    child.wait()

    run = build(logging={"wandb_project": "books"})
    train_on_ranks(run, prepare=lambda: before_each_step(kill))
    assert capfd.readouterr().out.count("warning: W&B cannot be written") == 1
    assert list(read_metrics(run.checkpoint.save)) == list(range(1, LAST + 1))
