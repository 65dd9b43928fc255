"""The plan of --dry-run equals real batches and formulas that are written out here."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests_tiny import tiny_settings

from megatron_neobert.config.cli import PlanOptions
from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import PhaseChange, Settings
from megatron_neobert.data.batches import windows
from megatron_neobert.data.batches.batch import build_stream
from megatron_neobert.data.batches.corpora import open_corpora, open_phases
from megatron_neobert.model.flops import checkpoint_bytes, find_gpu, training_flops_per_token
from megatron_neobert.planning.forecast import sample_iteration
from megatron_neobert.planning.plan import checkpoint_lines, print_plan, start_warnings
from megatron_neobert.runtime.atomic_files import MANIFEST
from megatron_neobert.text import approximate, duration, in_bytes, percent, with_prefix

# ---- averages over iterations

EPOCHS = 2
ONE_SEQUENCE = {"global_batch_size": 1, "micro_batch_size": 1}
PACKINGS = [
    {"long_documents": "truncate"},
    {"long_documents": "chunk"},
    {"batch_layout": "concatenated"},
    {"document_block_size": 4},
]
PIECES = [{"long_documents": "chunk"}, {"batch_layout": "concatenated"}]


@pytest.mark.parametrize("data", PACKINGS, ids=lambda data: str(*data.values()))
def test_the_sample_has_the_epochs_pieces_and_tokens_of_the_batches(data, tiny_corpus, monkeypatch):
    """The corpus has several windows and is read for two epochs."""
    monkeypatch.setattr(windows, "WINDOW_DOCUMENTS", 128)
    settings = tiny_settings(tiny_corpus, data={"seq_length": 64, **data}, training=ONE_SEQUENCE)
    inputs = open_corpora(settings.data)
    sample = sample_iteration(settings, inputs)
    iterations, pieces, tokens, squares = 0, 0, 0, 0
    stream = build_stream(settings, [inputs])
    for step, packed in zip(stream.rank_batches(), stream.global_batches(), strict=False):
        iterations += 1
        pieces += len(packed.packed.segments)
        (batch,) = step.micro_batches
        tokens += batch.real_tokens
        bounds = batch.cu_seqlens_n[batch.cu_seqlens_n <= batch.real_tokens]
        squares += int((bounds.diff() ** 2).sum())
        if step.cursor_after.epoch == EPOCHS:
            break
    source = inputs.training[0]
    lengths = source.corpus.lengths_of(source.documents.numbers(np.arange(len(source.documents))))
    read = lengths.clip(max=62).sum() / lengths.sum() if settings.data.long_documents == "truncate" else 1
    assert sample.truncated == pytest.approx(1 - read)
    assert sample.document_tokens == lengths.mean()
    documents = EPOCHS * len(source.documents)
    # The second epoch has other windows, each of which may need one packed sequence more or less.
    assert sample.epochs == (pytest.approx(EPOCHS / iterations, rel=0.02),)
    assert sample.pieces == pytest.approx(pieces / iterations, rel=0.02)
    assert (pieces > documents) == (data in PIECES)
    assert sample.tokens == pytest.approx(tokens / iterations, rel=0.02)
    assert sample.packing_efficiency == pytest.approx(tokens / (iterations * 64), rel=0.02)
    assert sample.attended_tokens == pytest.approx(squares / tokens, rel=0.02)


def test_the_plan_of_a_blend_has_the_shares_and_epochs_of_its_batches(tiny_corpus, monkeypatch, capsys):
    """The plan samples eight windows, which are read here one packed sequence at a time."""
    monkeypatch.setattr(windows, "WINDOW_DOCUMENTS", 64)
    blend = ("0.75", tiny_corpus.prefix, "0.25", f"{tiny_corpus.prefix}:min=20")
    settings = tiny_settings(tiny_corpus, data={"data_path": blend}, training=ONE_SEQUENCE)
    inputs = open_corpora(settings.data)
    sample = sample_iteration(settings, inputs)
    sequences, tokens_c, documents_c = 0, np.zeros(2), np.zeros(2)
    for batch in build_stream(settings, [inputs]).global_batches():
        segments = batch.packed.segments
        sequences += 1
        documents_c += np.bincount(segments.components_n, minlength=2)
        tokens_c += np.bincount(segments.components_n, weights=segments.packed_lengths_n, minlength=2)
        if batch.cursor_after.window == 8:
            break
    assert sample.token_shares == tuple(tokens_c / tokens_c.sum())
    assert sample.packing_efficiency == pytest.approx(tokens_c.sum() / (sequences * settings.data.seq_length))
    sizes = [len(source.documents) for source in inputs.training]
    assert sample.epochs == pytest.approx(documents_c / sizes / sequences)
    assert f"times, {100 * sample.token_shares[0]:.2f} % of the tokens" in plan_of(settings, capsys)


# ---- the printed plan


def lines_of(settings: Settings, capsys: Any, *, price: float | None = None) -> list[str]:
    assert print_plan(settings, open_phases(settings), PlanOptions(price=price), world_size=1) == 0
    return capsys.readouterr().out.splitlines()


def plan_of(settings: Settings, capsys: Any) -> str:
    """Return the printed plan as one line with single spaces."""
    return " ".join(" ".join(lines_of(settings, capsys)).split())


def add_checkpoint(folder: Path, iteration: int) -> None:
    checkpoint = folder / f"iter_{iteration:07}"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).touch()


@pytest.mark.parametrize(
    ("width", "compute", "percent_of_peak", "source"),
    [
        (768, {}, 42, "in bf16 with 28 x 768. Other"),
        (768, {"fp8_format": "hybrid"}, 45, "in FP8 tensorwise with 28 x 768. Other"),
        (768, {"fp8_format": "e4m3", "fp8_recipe": "delayed"}, 49, "in FP8 delayed with 28 x 768. Other"),
        (512, {}, 26, "in bf16 with 12 x 512. Other"),
        (384, {}, 26, "in bf16 with 12 x 512; narrower models have not been measured and may be slower. Other"),
    ],
)
def test_time_and_price_are_ten_milliseconds_per_step_and_flops_divided_by_the_measured_rate(
    tiny_corpus, capsys, width, compute, percent_of_peak, source
):
    """One rank does not wait for a network."""
    settings = tiny_settings(
        tiny_corpus, model={"hidden_size": width}, training={"bf16": True, "train_iters": 10**9}, compute=compute
    )
    sample = sample_iteration(settings, open_corpora(settings.data))
    flops = training_flops_per_token(
        settings, vocab_size=tiny_corpus.vocab_size, document_tokens=sample.attended_tokens
    )
    gpu = find_gpu("NVIDIA H200")
    assert gpu is not None
    rate = gpu.bf16_tflops * 1e12 * percent_of_peak / 100
    seconds = 10**9 * (0.01 + flops * sample.tokens / rate)
    lines = lines_of(settings, capsys, price=2.5)
    (line,) = [line for line in lines if " H200 " in line and "fits" in line]
    assert f" {duration(seconds)} " in line
    assert f" {with_prefix(sample.tokens * 10**9 / seconds, '')} " in line
    (row,) = [line for line in lines if line.endswith(f" {2.5 * seconds / 3600:,.0f}")]
    assert row.split()[0] == "1" and f" {duration(seconds)} " in row
    price_in_cents = f" {0.001 * seconds / 3600:,.2f}"
    assert any(line.endswith(price_in_cents) for line in lines_of(settings, capsys, price=0.001)), "cents below 10"
    assert any("A100" in line for line in lines) == (not compute), "an A100 has no FP8"
    plan = plan_of(settings, capsys)
    assert f"10 ms, FLOP / (GPUs x peak x {percent_of_peak} %)" in plan and source in plan


@pytest.mark.parametrize("precision", [{}, {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"}])
def test_a_precision_whose_speed_was_not_measured_has_no_times(tiny_corpus, capsys, precision):
    settings = tiny_settings(tiny_corpus, training={"bf16": "bf16" in precision})
    settings = settings.with_section("compute", **{name: precision[name] for name in precision if name != "bf16"})
    plan = plan_of(settings, capsys)
    assert f"no run in {'FP8 mxfp8' if precision else 'float32'} has been measured" in plan
    assert "tokens/s" not in plan and "scaling" not in plan


@pytest.mark.parametrize(("epochs", "warns"), [(4.0, 0), (27.0, 1)])
def test_the_plan_has_the_epochs_and_warns_of_many(epochs, warns, tiny_corpus, capsys):
    settings = tiny_settings(tiny_corpus, training={"global_batch_size": 2, "micro_batch_size": 1})
    (share,) = sample_iteration(settings, open_corpora(settings.data)).epochs  # per iteration
    settings = settings.with_section("training", train_iters=round(epochs / share))
    plan = plan_of(settings, capsys)
    assert f"read about {approximate(epochs)} times" in plan
    assert plan.count("warning: documents are read up to") == warns


def test_a_start_has_the_warnings_of_the_plan_and_the_time_of_a_long_iteration_on_a_cpu(tiny_corpus, capsys):
    """The iteration is of a model of 13 billion parameters."""
    model = {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40}
    settings = tiny_settings(tiny_corpus, data={"seq_length": 16}, training={"train_iters": 10**6}, model=model)
    inputs = [open_corpora(settings.data)]
    warnings = start_warnings(settings, inputs, world_size=1, cpu_cores=2)
    subjects = ("% of the tokens are never read", "documents are read up to")
    assert len(warnings) == 3 and all(map(str.__contains__, warnings, (*subjects, "per iteration at an assumed 50")))
    plan = plan_of(settings, capsys)
    assert all(warning in plan for warning in warnings[:2])
    assert start_warnings(settings, inputs, world_size=1, cpu_cores=None) == warnings[:2]
    calm = tiny_settings(tiny_corpus, data={"split": "100"})
    assert start_warnings(calm, [open_corpora(calm.data)], world_size=1, cpu_cores=1) == []


def test_the_plan_has_the_held_out_documents_and_warns_if_many_tokens_are_truncated(tiny_corpus, capsys):
    settings = tiny_settings(tiny_corpus, data={"split": "90,8,2", "seq_length": 16})
    sample, plan = sample_iteration(settings, open_corpora(settings.data)), plan_of(settings, capsys)
    of, held_out = re.search(r"of ([\d,]+) documents .*?, ([\d,]+) held out by --split 90,8,2", plan).groups()
    assert int(held_out) == pytest.approx(int(of) / 10, abs=1)
    assert f"warning: {percent(sample.truncated)} of the tokens are never read, because long documents are cut" in plan
    assert f"at 16 (uncut, a sampled document has {sample.document_tokens:,.0f} on average" in plan
    all_read = plan_of(tiny_settings(tiny_corpus, data={"split": "100", "long_documents": "chunk"}), capsys)
    assert "held out" not in all_read and "never read" not in all_read


def test_the_plan_counts_the_iterations_of_the_newest_checkpoint_as_done(tiny_corpus, tmp_path, capsys):
    add_checkpoint(tmp_path, 4)
    keep = {"save_interval": 1, "keep_last": 2}
    settings = tiny_settings(tiny_corpus, save=tmp_path / "run", checkpoint={"continue_from": str(tmp_path), **keep})
    plan = plan_of(settings, capsys)
    assert "6 iterations, 4 of them done" in plan
    assert "2 of 1.6 MiB, one every 1 iteration, and the last 2 are kept: at most 2 at a time" in plan
    assert "done" not in plan_of(tiny_settings(tiny_corpus), capsys)


def test_the_plan_of_phases_has_the_figures_of_each_phase_and_their_sums(tiny_corpus, tmp_path, capsys):
    """Each phase has the figures of a run without phases with the same settings and number of iterations."""
    phases = (PhaseChange(after_iters=400, seq_length=64, mask_prob=0.05), PhaseChange(after_iters=2000, mask_prob=0.1))
    settings = tiny_settings(tiny_corpus, training={"bf16": True, "train_iters": 1000, "phases": phases})
    plan = plan_of(settings, capsys)
    total = 0.0
    for first, last, phase in zip((1, 401), (400, 1000), resolve_phases(settings), strict=False):
        sample = sample_iteration(phase.settings, open_corpora(phase.settings.data))
        tokens = (last - first + 1) * sample.tokens
        assert f"iterations {first:,} to {last:,}: {approximate(tokens)} tokens of documents" in plan
        assert f"packing efficiency {percent(sample.packing_efficiency, digits=2)}" in plan
        total += tokens
    assert f"1,000 iterations: {approximate(total)} tokens of documents" in plan
    assert "phase 2" not in plan, "phase 2 begins after the last iteration"
    add_checkpoint(tmp_path, 500)
    resumed = plan_of(settings.with_section("checkpoint", load=str(tmp_path)), capsys)
    assert "iterations 1 to 400" not in resumed


# ---- checkpoints


def most_at_a_time(saved: list[int], *, keep_last: int | None, keep_every: int | None) -> int:
    """Return the number of checkpoints on the disk after the last save and before its deletion."""
    if keep_last is None:
        return len(saved)
    older = saved[: -keep_last - 1]
    multiples = [each for each in older if keep_every and each % keep_every == 0]
    return len(saved) - len(older) + len(multiples)


@pytest.mark.parametrize("done", [0, 30, 33, 87, 95])
@pytest.mark.parametrize(("keep_last", "keep_every"), [(None, None), (2, None), (3, 20), (2, 25), (50, 10)])
@pytest.mark.parametrize("last", [90, 95])
def test_the_plan_has_the_number_of_checkpoints_and_the_most_at_a_time(tmp_path, last, keep_last, keep_every, done):
    keep = {"save": str(tmp_path), "save_interval": 10, "keep_last": keep_last, "keep_every": keep_every}
    settings = Settings().with_section("checkpoint", **keep).with_section("training", train_iters=last)
    saved = [each for each in range(done + 1, last + 1) if each % 10 == 0 or each == last]
    (line,) = checkpoint_lines(settings, vocab_size=300, done=done)
    size = checkpoint_bytes(settings, vocab_size=300)
    most = most_at_a_time(saved, keep_last=keep_last, keep_every=keep_every)
    assert line.startswith(f"{len(saved)} of {in_bytes(size)}, one every 10 iterations, and ")
    assert f"at most {most} at a time, {in_bytes(most * size)};" in line


@pytest.mark.parametrize(("present", "room", "warns"), [((), 3, True), ((), 4, False), ((10, 20, 25), 2, False)])
def test_the_plan_and_a_start_warn_if_the_checkpoints_do_not_fit(tmp_path, monkeypatch, present, room, warns):
    """The last two and the multiples of 20 are kept, at most four. Two of the present ones are deleted."""
    for iteration in present:
        add_checkpoint(tmp_path, iteration)
    keep = {"save": str(tmp_path), "save_interval": 10, "keep_last": 2, "keep_every": 20}
    settings = Settings().with_section("checkpoint", **keep).with_section("training", train_iters=60)
    free = room * checkpoint_bytes(settings, vocab_size=300)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    lines = checkpoint_lines(settings, vocab_size=300, done=max(present, default=0))
    assert [line.startswith("warning: ") for line in lines] == [False, True][: 1 + warns]
