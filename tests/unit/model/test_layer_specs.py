"""The norms of local layers."""

import pytest
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.transformer_config import LocalLayerNorm, to_transformer_config

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("shared", [False, True])
def test_every_parameter_of_a_norm_is_marked_where_ranks_share_the_tokens(shared):
    """Megatron's own wrapper refuses that; without the mark each rank would keep the gradient of its tokens."""
    config = to_transformer_config(Settings())
    config.sequence_parallel = shared
    norm = LocalLayerNorm(config, 64, eps=1e-5)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [shared, shared]
    if shared:
        with pytest.raises(AssertionError, match="sequence parallel not supported"):
            WrappedTorchNorm(config, 64)
