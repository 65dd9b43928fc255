"""The CPU backend: what it redirects, and that it keeps away where CUDA is. Each case is a forked process."""

from collections.abc import Callable

import pytest
import torch
from processes import run_on_ranks

from megatron_neobert.runtime import cpu_backend, megatron_patches


def install() -> list[bool]:
    """Installs the backend twice; returns which of four functions were redirected."""

    def functions() -> tuple[object, ...]:
        return torch.cuda.current_device, torch.cuda.synchronize, torch.Tensor.cuda, torch.Tensor.type

    before = functions()
    cpu_backend.install()
    cpu_backend.install()
    return [new is not old for new, old in zip(functions(), before, strict=True)]


def our_own_device_mistakes_still_show() -> None:
    install()
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.zeros(2, device="cuda")
    assert torch.zeros(2).type() == "torch.FloatTensor"


def nothing_is_redirected_where_cuda_is_present() -> None:
    from megatron.core.optimizer import clip_grads

    torch.cuda.is_available = lambda: True
    assert not any(install())
    assert clip_grads.torch is torch


def the_gradient_norm_of_a_full_vocabulary_is_that_of_fp64_whole_or_in_halves() -> None:
    """As one rank has it, or two."""
    install()
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


@pytest.mark.parametrize(
    "claim",
    [
        our_own_device_mistakes_still_show,
        nothing_is_redirected_where_cuda_is_present,
        the_gradient_norm_of_a_full_vocabulary_is_that_of_fp64_whole_or_in_halves,
    ],
    ids=lambda claim: claim.__name__,
)
def test_cpu_backend(claim: Callable[[], None]):
    run_on_ranks(claim, world_size=1)
