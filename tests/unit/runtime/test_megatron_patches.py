"""FusedAdam, and the check of megatron.core's sources. Whole runs test the other patches."""

import re
from importlib.metadata import version

import pytest
import torch

from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime import megatron_patches
from megatron_neobert.training.optimizer import FusedAdam


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
