"""A rank imports neither TorchInductor nor Weights & Biases before it trains."""

import subprocess
import sys

import pytest
from processes import run_on_ranks

HEAVY = ("torch._inductor", "torch._dynamo", "wandb")


def check_modules_of_a_rank() -> None:
    import preloaded

    assert [name for name in HEAVY if name in preloaded.MODULES_OF_A_RANK] == []


def test_rank_imports_neither_inductor_nor_wandb():
    run_on_ranks(check_modules_of_a_rank, world_size=1)


@pytest.mark.slow
def test_importing_megatron_directly_imports_them():
    """The control. If it fails, runtime/megatron_imports.py is no longer needed."""
    code = f"import sys, megatron_neobert.training.loop; print([name for name in {HEAVY} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(list(HEAVY)) in ended.stdout
