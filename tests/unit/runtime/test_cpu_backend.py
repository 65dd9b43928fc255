"""The CPU backend: what it redirects, and that it keeps away where CUDA is."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from processes import run_on_ranks

from megatron_neobert.runtime import cpu_backend

INSTALL = """
import torch
originals = torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda, torch.Tensor.type
{before}
from megatron_neobert.runtime import cpu_backend
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


def compare_gradient_norms(folder: Path) -> None:
    cpu_backend.install()
    from megatron.core.optimizer import clip_grads

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    gradient = torch.randn(30_592, 768, generator=torch.Generator().manual_seed(0)) * 1e-4
    expected = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    halves = gradient.split(15_296)

    def gap(*parts: torch.Tensor) -> float:
        return abs(clip_grads.get_grad_norm_fp32([part.flatten() for part in parts]) / expected - 1)

    gaps = {"ours": [gap(gradient), gap(*halves)]}
    clip_grads.l2_norm_impl = clip_grads.local_multi_tensor_l2_norm
    gaps["megatron.core's"] = [gap(gradient), gap(*halves)]
    (folder / "gaps").write_text(json.dumps(gaps))


def test_the_gradient_norm_of_a_full_vocabulary_is_that_of_fp64_whole_or_in_halves(tmp_path):
    """As one rank has it, or two."""
    run_on_ranks(compare_gradient_norms, tmp_path, world_size=1)
    gaps = json.loads((tmp_path / "gaps").read_text())
    assert max(gaps["ours"]) < 2e-7  # 4.6e-8
    assert min(gaps["megatron.core's"]) > 1e-4  # the control: 1.1e-3 and 4.0e-4


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
