"""The Megatron model, the reference and the written export are one function; tools/check_parity.py measures it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tolerances import EUROBERT_LOGITS, MEGATRON_LOGITS

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "203"]


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tools" / "check_parity.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    output = tmp_path_factory.mktemp("parity") / "figures.json"
    result = run_check(*SMALL, "--json", str(output))
    assert result.returncode == 0, result.stderr
    assert "as expected, the controls included" in result.stdout
    return json.loads(output.read_text())


def test_megatron_computes_the_logits_of_the_reference_in_packed_rows(figures: dict[str, dict[str, float]]):
    assert figures["Megatron model, packed row"]["relative"] <= MEGATRON_LOGITS.gate
    assert figures["Megatron model, packed row"]["largest_logit"] > 3, "logits too small to show an error"


def test_written_export_computes_the_logits_of_the_reference(figures: dict[str, dict[str, float]]):
    assert figures["EuroBERT from disk, padded"]["relative"] <= EUROBERT_LOGITS.gate


@pytest.mark.parametrize("control", ["padding attended to", "rotary pairs not permuted"])
def test_controls_are_far_away(figures: dict[str, dict[str, float]], control: str):
    assert figures[f"control: {control}"]["relative"] > 1000 * MEGATRON_LOGITS.gate


def test_heads_of_odd_width_are_refused_before_anything_is_built():
    result = run_check("--hidden-size", "60", "--num-attention-heads", "4")
    assert result.returncode == 2
    assert "--hidden-size 60 is not a multiple of 2 x --num-attention-heads 4" in result.stderr
