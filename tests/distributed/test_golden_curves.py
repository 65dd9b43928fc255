"""Loss and gradient norm of every step of some runs equal those in golden_curves.json.

These tests detect every change of the numbers of training. `make golden` rewrites the file; state the reason in
CHANGELOG.md.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from ranks import flags_of, read_metrics, train_on_ranks
from test_layouts import largest_relative_gap
from test_muon import MUON
from tests_tiny import tiny_settings
from tolerances import GOLDEN_GRAD_NORM, GOLDEN_LOSS

from megatron_neobert.config.schedule import rate_at
from megatron_neobert.config.schema import PhaseChange, Settings
from megatron_neobert.runtime.atomic_files import sha256_of

CURVES = Path(__file__).with_name("golden_curves.json")
STEPS = 20
PHASES = (
    PhaseChange(after_iters=6, mask_prob=0.1),
    PhaseChange(after_iters=10, global_batch_size=16),
    PhaseChange(after_iters=14, seq_length=64, micro_batch_size=4),
)
# Runs of one rank; test_layouts.py compares other layouts with one rank.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "Muon": MUON,
    "WSD": {"optimizer": {"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt", "lr_wsd_decay_iters": 8}},
    "phases": {"training": {"phases": PHASES}},
}


def settings_of(name: str, corpus: Any, save: Path) -> Settings:
    sections = {"model": {"num_layers": 4}, **RUNS[name]}
    return tiny_settings(corpus, save=save, **sections).with_section("training", train_iters=STEPS, eval_iters=0)


def command_of(settings: Settings) -> str:
    """Return the command with which a user reproduces the curve."""
    data, save = settings.data, settings.checkpoint.save
    placeholders = {data.data_path[0]: "PREFIX", data.tokenizer_model: "TOKENIZER", save: "SAVE"}
    flags = [placeholders.get(flag, shlex.quote(flag)) for flag in flags_of(settings)]
    return f"NPROC_PER_NODE=1 bash examples/pretrain_neobert.sh {' '.join(flags)}"


def curve_of(name: str, corpus: Any, save: Path, **training: Any) -> dict[str, Any]:
    settings = settings_of(name, corpus, save)
    train_on_ranks(settings.with_section("training", **training))
    rates = list(read_metrics(save, "lr").values())
    assert rates == pytest.approx([rate_at(settings, iteration) for iteration in range(1, STEPS + 1)], rel=1e-12)
    curves = {key: list(read_metrics(save, key).values()) for key in ("loss", "grad_norm")}
    return {"command": command_of(settings), **curves}


def gap(expected: list[float], measured: list[float]) -> float:
    return largest_relative_gap(dict(enumerate(expected)), dict(enumerate(measured)))


@pytest.fixture(scope="module")
def golden(tiny_corpus: Any) -> dict[str, Any]:
    curves = json.loads(CURVES.read_text())
    if not os.environ.get("WRITE_GOLDEN"):
        assert curves["corpus_sha256"] == sha256_of(Path(f"{tiny_corpus.prefix}.bin")), "the corpus has changed"
    return curves


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_its_golden_curve(tiny_corpus, golden, tmp_path, name):
    curve = curve_of(name, tiny_corpus, tmp_path)
    if os.environ.get("WRITE_GOLDEN"):
        written = json.loads(CURVES.read_text())
        written |= {"corpus_sha256": sha256_of(Path(f"{tiny_corpus.prefix}.bin")), name: curve}
        CURVES.write_text(json.dumps(written, indent=1) + "\n")
        return
    assert curve["command"] == golden[name]["command"]
    loss, grad_norm = (gap(golden[name][key], curve[key]) for key in ("loss", "grad_norm"))
    print(f"{name}: {loss:.1e} {grad_norm:.1e}")
    assert loss <= GOLDEN_LOSS.gate
    assert grad_norm <= GOLDEN_GRAD_NORM.gate


@pytest.mark.parametrize("change", [{"seed": 1}, {"loss_normalization": "micro_batch"}], ids=["seed", "mean"])
def test_run_with_another_setting_has_another_curve(tiny_corpus, golden, tmp_path, change):
    curve = curve_of("plain", tiny_corpus, tmp_path, **change)
    assert gap(golden["plain"]["loss"], curve["loss"]) > 100 * GOLDEN_LOSS.gate
