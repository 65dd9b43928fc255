"""Attention over packed rows."""

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.model.attention import CoreAttention, pack_row
from megatron_neobert.model.packed_kernels import TorchAttention, attend_by_document
from megatron_neobert.model.transformer_config import to_transformer_config

HEADS, WIDTH = 2, 12


pytestmark = pytest.mark.usefixtures("process_group")


def make_layers(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, HEADS, WIDTH, generator=generator, requires_grad=True) for _ in range(3)]


def bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attend_with_a_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]):
    """The definition: softmax over the tokens of the same document."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = torch.einsum("qnd,knd->nqk", query, key) / WIDTH**0.5
    scores = scores.masked_fill(document[:, None] != document[None, :], -torch.inf)
    return torch.einsum("nqk,knd->qnd", scores.softmax(-1), value).flatten(1)


def test_a_token_attends_to_its_document_alone_and_in_both_directions():
    layers, lengths = make_layers(9), (4, 1, 4)
    context = attend_by_document(*layers, bounds(*lengths))
    torch.testing.assert_close(context, attend_with_a_mask(*layers, lengths))
    assert not torch.allclose(context, attend_with_a_mask(*layers, (9,)))


def test_the_run_ends_with_one_sentence_where_transformer_engine_has_no_fused_kernel():
    class NoKernel(TorchAttention):
        def attend(self, *arguments):
            raise ValueError("No dot product attention backend is available for the provided inputs. Please run with")

    config = to_transformer_config(Settings())
    attention = CoreAttention(config, 1, AttnMaskType.padding, "self", kernel=NoKernel)
    with pytest.raises(ConfigError, match="no fused attention kernel for this model on this GPU"):
        attention(*make_layers(3), None, packed_seq_params=pack_row(bounds(3), 3, rotation=None))
