"""The optimizer in place of torch's; what else is fixed in megatron.core is tested by whole runs."""

import re
from importlib.metadata import version

import pytest
import torch

from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime import megatron_patches
from megatron_neobert.training.optimizer import FusedAdam


def test_a_rank_that_holds_no_weight_of_a_group_updates_the_others():
    """The distributed optimizer cuts all weights evenly: a rank can hold a part of the embedding and nothing else."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedAdam([{"params": [weight]}, {"params": []}], lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(weight, torch.full((3,), -0.5))
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


def written_in_another_way(grads_for_norm, norm_type=2.0, group=None):
    """A function of a later release, as far as the patches can tell."""


def test_the_installed_megatron_is_what_the_patches_were_written_for():
    megatron_patches.check_sources()


@pytest.mark.parametrize(("owner", "name", "text"), megatron_patches._EXPECTED_SOURCE)
def test_a_patched_function_that_upstream_has_changed_is_refused_with_the_version(monkeypatch, owner, name, text):
    monkeypatch.setattr(owner, name, written_in_another_way)
    with pytest.raises(
        ConfigError, match=rf"megatron-core {re.escape(version('megatron-core'))} is not .*{name} does not contain"
    ):
        megatron_patches.check_sources()


def test_a_gradient_norm_of_other_arguments_is_refused(monkeypatch):
    monkeypatch.setattr(megatron_patches.clip_grads, "get_grad_norm_fp32", written_in_another_way)
    with pytest.raises(ConfigError, match="get_grad_norm_fp32 has the parameters grads_for_norm, norm_type, group"):
        megatron_patches.check_sources()
