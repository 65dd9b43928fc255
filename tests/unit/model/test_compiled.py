"""Functions that are compiled on a GPU: they have no graph break, and compiled or not they compute the same."""

import shutil

import pytest
import torch
from torch import Tensor

from megatron_neobert.model.attention import rotate
from megatron_neobert.model.loss import largest_logits, logits_gradient, sum_exponentials

TOKENS, HEADS, WIDTH = 24, 3, 8
INDUCTOR = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, g++"),
        pytest.mark.skipif(" " in torch.__file__, reason="Inductor's linker call breaks at the space in torch's path"),
    ],
)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def layers_and_angles(dtype: torch.dtype) -> list[Tensor]:
    angles_t1e = 100 * normal(TOKENS, 1, WIDTH // 2)
    query_tnd, key_tnd, _ = normal(TOKENS, HEADS, 3 * WIDTH, dtype=dtype).split(WIDTH, dim=-1)  # strided, as in a layer
    return [query_tnd, key_tnd, angles_t1e.cos(), angles_t1e.sin()]


def logits_and_more(dtype: torch.dtype) -> list[Tensor]:
    logits_mv = normal(TOKENS, 40, dtype=dtype)
    logits_mv[:, -3:] = torch.finfo(dtype).min  # the vocabulary's padding
    column_m, here_m = torch.arange(TOKENS), torch.arange(TOKENS) % 3 > 0
    largest_m = logits_mv.float().amax(1)
    total_m = (logits_mv.float() - largest_m.unsqueeze(1)).exp().sum(1)
    return [logits_mv, column_m, here_m, largest_m, total_m, normal(TOKENS)]


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize(("function", "arguments"), [(largest_logits, 1), (sum_exponentials, 4), (logits_gradient, 6)])
def test_the_loss_compiled_is_the_loss_eager(function, arguments, backend):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = logits_and_more(dtype)[:arguments]
        compiled = torch.compile(function.__wrapped__, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_rotation_compiled_is_rotation_eager(backend):
    plain = rotate.__wrapped__
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        eager, compiled = ([tensor.requires_grad_() for tensor in layers_and_angles(dtype)] for _ in range(2))
        results = plain(*eager), torch.compile(plain, fullgraph=True, backend=backend)(*compiled)
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
            one.float().square().sum().backward(retain_graph=True)
            other.float().square().sum().backward(retain_graph=True)
        for one, other in zip(eager, compiled, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=10 * tolerance)
