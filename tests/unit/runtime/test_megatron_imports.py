"""What a rank imports before it can train."""

import subprocess
import sys

import pytest
from processes import run_on_ranks

HEAVY = ("torch._inductor", "torch._dynamo", "wandb")


def rank_has_imported_nothing_heavy() -> None:
    """In a fork of the server that has imported Megatron and the training loop as a rank does."""
    import preloaded

    assert [name for name in HEAVY if name in preloaded.MODULES_OF_A_RANK] == []


def test_rank_imports_neither_compiler_nor_wandb():
    run_on_ranks(rank_has_imported_nothing_heavy, world_size=1)


@pytest.mark.slow  # the control: it says when megatron_imports.py can go
def test_megatron_alone_imports_them():
    code = f"import sys, megatron_neobert.training.loop; print([name for name in {HEAVY} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(list(HEAVY)) in ended.stdout
