"""The optimizer in place of torch's; what else is fixed in megatron.core is tested by whole runs."""

import torch

from megatron_neobert.runtime.megatron_patches import FusedAdam


def test_a_rank_that_holds_no_weight_of_a_group_updates_the_others():
    """The distributed optimizer cuts all weights evenly: a rank can hold a part of the embedding and nothing else."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = FusedAdam([{"params": [weight]}, {"params": []}], lr=0.5)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(weight, torch.full((3,), -0.5))
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]
