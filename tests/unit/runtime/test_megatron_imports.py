"""What a rank imports before it can train; a fresh interpreter each, since this one has imported it all."""

import subprocess
import sys

import pytest

QUICK = "from megatron_neobert.runtime.megatron_imports import import_megatron; import_megatron()"
LOOP = "import sys, megatron_neobert.training.loop"
HEAVY = ("torch._inductor", "torch._dynamo", "wandb")


def run(*statements: str) -> str:
    ended = subprocess.run([sys.executable, "-c", "; ".join(statements)], capture_output=True, text=True, check=True)
    return ended.stdout + ended.stderr


def test_rank_imports_neither_compiler_nor_wandb_but_both_work_afterwards():
    output = run(
        QUICK,
        LOOP,
        f"print([name for name in {HEAVY} if name in sys.modules])",
        "import torch, wandb; from megatron.core.fusions.fused_bias_swiglu import swiglu",
        "print(wandb.__name__, swiglu.__name__, torch.compile.__module__)",
        "torch.compiler.set_stance('force_eager'); print(swiglu(torch.ones(2, 4)).shape)",
    )
    assert output.splitlines() == ["[]", "wandb swiglu torch", "torch.Size([2, 2])"]


@pytest.mark.slow  # the control: it says when megatron_imports.py can go
def test_megatron_alone_imports_them():
    output = run(LOOP, f"print([name for name in {HEAVY} if name in sys.modules])")
    assert str(list(HEAVY)) in output
