"""The CPU backend and the gradient norm, in a forked process, because both patch torch and megatron.core."""

import pytest
import torch
from processes import run_on_ranks

from megatron_neobert.runtime import cpu_backend, megatron_patches


def compare_norms() -> None:
    """Compare the norm of a vocabulary-sized gradient with fp64, on one rank and as two tensor-parallel halves."""
    cpu_backend.install()
    from megatron.core.optimizer import clip_grads

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    gradient = torch.randn(30_592, 768, generator=torch.Generator().manual_seed(0)) * 1e-4
    expected = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()

    def relative_errors() -> list[float]:
        splits = ([gradient], gradient.split(15_296))
        norms = [clip_grads.get_grad_norm_fp32([tensor.flatten() for tensor in tensors]) for tensors in splits]
        return [abs(float(norm) / expected - 1) for norm in norms]

    assert min(relative_errors()) > 1e-4  # control, megatron.core's norm: measured 1.1e-3 and 4.0e-4
    megatron_patches.install()
    assert max(relative_errors()) < 2e-7  # measured 4.6e-8
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_gradient_norm_equals_fp64_whole_or_in_halves_and_wrong_devices_in_our_code_still_fail():
    run_on_ranks(compare_norms, world_size=1)
