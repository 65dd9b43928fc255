"""The CPU backend: what it redirects, and that it keeps away where CUDA is."""

import subprocess
import sys

INSTALL = """
import torch
originals = torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda, torch.Tensor.type
{before}
from megatron_neobert import cpu_backend
cpu_backend.install()
cpu_backend.install()
now = torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda, torch.Tensor.type
redirected = [new is not old for new, old in zip(now, originals)]
"""


def run(code: str, *, before: str = "") -> None:
    finished = subprocess.run(
        [sys.executable, "-c", INSTALL.format(before=before) + code], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_megatron_finds_the_cpu_where_it_asks_for_cuda():
    run(
        "assert all(redirected), redirected\n"
        "from megatron.core.optimizer import clip_grads\n"
        "assert clip_grads.torch.zeros(2, device='cuda').device.type == 'cpu'\n"
        "assert clip_grads.torch.cuda.current_device() == torch.device('cpu')\n"
    )


def test_our_own_device_mistakes_still_show():
    run(
        "import pytest\n"
        "with pytest.raises((AssertionError, RuntimeError), match='CUDA'):\n"
        "    torch.zeros(2, device='cuda')\n"
        "assert torch.zeros(2).type() == 'torch.FloatTensor'\n"
    )


def test_nothing_is_redirected_where_cuda_is_present():
    run(
        "assert not any(redirected), redirected\n"
        "from megatron.core.optimizer import clip_grads\n"
        "assert clip_grads.torch is torch\n",
        before="torch.cuda.is_available = lambda: True",
    )
