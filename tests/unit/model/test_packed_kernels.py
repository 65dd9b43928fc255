"""Attention over packed rows."""

import pytest
import torch

from megatron_neobert.model.packed_kernels import attend_by_document

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
