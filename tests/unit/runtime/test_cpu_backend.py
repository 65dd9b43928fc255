"""The CPU backend and patches of megatron.core. What patches torch runs in a forked process."""

import re
from importlib.metadata import version

import pytest
import torch
from processes import run_on_ranks

from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime import cpu_backend, megatron_patches
from megatron_neobert.training.optimizer import FusedAdam


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


# --- FusedAdam, and the check of megatron.core's sources; whole runs test the other patches


def test_fused_adam_updates_the_other_groups_if_a_group_is_empty():
    """With the distributed optimizer, a rank may have only a part of the embedding."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedAdam([{"params": [weight]}, {"params": []}], lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(weight, torch.full((3,), -0.5))
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def changed_function(grads_for_norm, norm_type=2.0, group=None):
    """A function with other parameters and another source than the patches expect."""


@pytest.mark.parametrize(("owner", "name", "text"), megatron_patches._EXPECTED_SOURCE)
def test_changed_source_of_megatron_is_refused_with_its_version(monkeypatch, owner, name, text):
    monkeypatch.setattr(owner, name, changed_function)
    with pytest.raises(
        ConfigError, match=rf"megatron-core {re.escape(version('megatron-core'))} is not .*{name} does not contain"
    ):
        megatron_patches.check_sources()
