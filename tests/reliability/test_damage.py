"""Checkpoints that have rotted: found before they are used, said by name, and never a reason to begin anew."""

from pathlib import Path

import pytest
from reliability.conftest import ITERATIONS
from reliability.states import assert_same_state, names_in


def flip_bit(path: Path) -> None:
    """One bit in the middle; size and time stay."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def one_of(checkpoint: Path) -> Path:
    """A file with tensors."""
    return min(checkpoint.glob("*.safetensors"))


@pytest.mark.slow
def test_a_bit_flip_and_a_truncation_are_named_and_the_run_goes_on_exactly_from_the_checkpoint_before_them(
    start, copy_until, undisturbed
):
    save = copy_until(250)
    flipped, truncated = one_of(save / "iter_0000250"), one_of(save / "iter_0000200")
    size = truncated.stat().st_size
    flip_bit(flipped)
    truncate(truncated)
    with start(save) as training:
        assert training.finish() == 0, training.output
    warnings = [line for line in training.lines if line.startswith("warning: skipped a damaged checkpoint")]
    assert len(warnings) == 2
    assert str(flipped) in warnings[0] and "sha256" in warnings[0]
    assert str(truncated) in warnings[1] and f"{size // 2} bytes, expected {size}" in warnings[1]
    assert f"from {save / 'iter_0000150'}" in training.output
    last = f"iter_{ITERATIONS:07d}"
    assert_same_state(save / last, undisturbed / last)
    assert {"iter_0000250.damaged", "iter_0000200.damaged", "iter_0000250", "iter_0000200"} <= names_in(save)
