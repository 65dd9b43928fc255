"""The gradient norm of the CPU backend, in a forked process, which it changes."""

import torch
from processes import run_on_ranks

from megatron_neobert.runtime import cpu_backend, megatron_patches


def compare_norms() -> None:
    """As one rank has the gradient of a full vocabulary, or two."""
    cpu_backend.install()
    from megatron.core.optimizer import clip_grads

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    gradient = torch.randn(30_592, 768, generator=torch.Generator().manual_seed(0)) * 1e-4
    expected = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()

    def gaps() -> list[float]:
        cuts = ([gradient], gradient.split(15_296))
        norms = [clip_grads.get_grad_norm_fp32([part.flatten() for part in parts]) for parts in cuts]
        return [abs(float(norm) / expected - 1) for norm in norms]

    assert min(gaps()) > 1e-4  # the control, megatron.core's: 1.1e-3 and 4.0e-4
    megatron_patches.install()
    assert max(gaps()) < 2e-7  # 4.6e-8
    try:
        torch.zeros(2, device="cuda")
    except (AssertionError, RuntimeError):
        return
    raise AssertionError("a device mistake of our own does not show")


def test_the_gradient_norm_is_that_of_fp64_whole_or_in_halves_and_our_own_device_mistakes_show():
    run_on_ranks(compare_norms, world_size=1)
