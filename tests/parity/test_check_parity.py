"""`neobert check parity`: the Megatron model, the reference and written exports compute the same function."""

import json
from typing import Any

import pytest
from processes import run_command
from tolerances import (
    BFLOAT16_LOGITS,
    EXPORTED_LOGITS,
    MEGATRON_LOGITS,
    STEP_GRADIENT,
    STEP_LOSS,
)

from checkpoint_conversion.mapping import TABLES
from checkpoint_conversion.parity import STEPS

Figures = dict[str, dict[str, Any]]
SMALL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "203"]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    folder = tmp_path_factory.mktemp("parity")
    output, theirs = folder / "figures.json", folder / "theirs"
    theirs.write_text("theirs")
    output.symlink_to(theirs)
    result = run_command("megatron_neobert.__main__", "check", "parity", *SMALL, "--step", "--json", output)
    assert result.code == 0, result.output
    assert "as expected, including the controls" in result.output
    assert theirs.read_text() == "theirs", "a link is replaced, not followed"
    return json.loads(output.read_text())


@pytest.mark.parametrize("model", ["reference", "Megatron model"])
def test_packed_documents_have_the_logits_of_the_padded_reference(figures: Figures, model: str):
    packed = figures[f"{model}, packed"]
    assert packed["relative"] <= MEGATRON_LOGITS.gate
    assert packed["max_abs"] > 3 * packed["relative"], "logits too small to show an error"


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("layout", TABLES)
def test_written_export_computes_the_logits_of_the_reference(figures: Figures, layout: str, rows: str):
    assert figures[f"{layout}, {rows}, float32"]["relative"] <= EXPORTED_LOGITS.gate
    assert figures[f"{layout}, {rows}, bfloat16"]["relative"] <= BFLOAT16_LOGITS.gate


@pytest.mark.parametrize("control", ["padding attended to", "rotary pairs not permuted"])
def test_controls_differ_by_far_more_than_the_tolerance(figures: Figures, control: str):
    assert figures[f"control: {control}"]["relative"] > 1000 * MEGATRON_LOGITS.gate


@pytest.mark.parametrize(("mask", "wrong"), [("", "rotary pairs not permuted"), (", causal", "not causal")])
def test_step_has_the_loss_and_gradients_of_the_reference(figures: Figures, mask: str, wrong: str):
    """In fp32. Kernels that need a GPU are not run, and are reported with the reason."""
    step = figures["step"]
    exact, control = step[f"local layers, float32{mask}"], step[f"control: {wrong}"]
    assert exact["loss"] <= STEP_LOSS.gate < control["loss"] / 1000
    assert exact["gradient"] <= STEP_GRADIENT.gate < control["gradient"] / 1000
    local = {name for name in STEPS if name.startswith("local")}
    assert set(figures["not run"]) == set(STEPS) - local
    assert all("Transformer Engine" in reason for reason in figures["not run"].values())


def test_heads_of_odd_width_are_refused_before_a_model_is_built():
    sizes = ("--hidden-size", 60, "--num-attention-heads", 4)
    result = run_command("megatron_neobert.__main__", "check", "parity", *sizes)
    assert result.refused(2), result.output
    assert "--hidden-size 60 / --num-attention-heads 4 gives heads of width 15" in result.output
