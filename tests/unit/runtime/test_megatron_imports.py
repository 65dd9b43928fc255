"""What a rank imports before it can train."""

import subprocess
import sys

import pytest
import torch
from processes import run_on_ranks

HEAVY = ("torch._inductor", "torch._dynamo", "wandb")


def rank_has_imported_nothing_heavy() -> None:
    """In a fork of the server that has imported Megatron and the training loop as a rank does."""
    import preloaded

    assert [name for name in HEAVY if name in preloaded.MODULES_OF_A_RANK] == []


def both_work_afterwards() -> None:
    import wandb
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    assert (wandb.__name__, torch.compile.__module__) == ("wandb", "torch")
    torch.compiler.set_stance("force_eager")
    assert swiglu(torch.ones(2, 4)).shape == (2, 2)


def test_rank_imports_neither_compiler_nor_wandb():
    run_on_ranks(rank_has_imported_nothing_heavy, world_size=1)


@pytest.mark.slow
def test_compiler_and_wandb_work_afterwards():
    run_on_ranks(both_work_afterwards, world_size=1)


@pytest.mark.slow  # the control: it says when megatron_imports.py can go
def test_megatron_alone_imports_them():
    code = f"import sys, megatron_neobert.training.loop; print([name for name in {HEAVY} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(list(HEAVY)) in ended.stdout
