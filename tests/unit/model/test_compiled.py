"""Functions that are compiled on a GPU have no graph breaks, and compute the same compiled and eager."""

import shutil

import pytest
import torch
from torch import Tensor

from megatron_neobert.model.attention import rotate
from megatron_neobert.model.loss import largest_logits, logits_gradient, sum_exponentials
from megatron_neobert.model.transformer_config import rms_norm

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


def heads_and_angles(dtype: torch.dtype) -> list[Tensor]:
    angles_t1e = 100 * normal(TOKENS, 1, WIDTH // 2)
    # Strided, like in a layer.
    query_tnd, key_tnd, _ = normal(TOKENS, HEADS, 3 * WIDTH, dtype=dtype).split(WIDTH, dim=-1)
    return [query_tnd, key_tnd, angles_t1e.cos(), angles_t1e.sin()]


def loss_inputs(dtype: torch.dtype) -> list[Tensor]:
    logits_mv = normal(TOKENS, 40, dtype=dtype)
    logits_mv[:, -3:] = torch.finfo(dtype).min  # padding of the vocabulary
    column_m, is_local_m = torch.arange(TOKENS), torch.arange(TOKENS) % 3 > 0
    largest_m = logits_mv.float().amax(1)
    total_m = (logits_mv.float() - largest_m.unsqueeze(1)).exp().sum(1)
    return [logits_mv, column_m, is_local_m, largest_m, total_m, normal(TOKENS)]


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize(("function", "arguments"), [(largest_logits, 1), (sum_exponentials, 4), (logits_gradient, 6)])
def test_the_loss_compiled_is_the_loss_eager(function, arguments, backend):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = loss_inputs(dtype)[:arguments]
        compiled = torch.compile(function.__wrapped__, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


def hidden_and_weight(dtype: torch.dtype) -> list[Tensor]:
    return [normal(TOKENS, 1, 32, dtype=dtype), 1 + normal(32, dtype=dtype)]


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize(
    ("function", "build", "more"), [(rotate, heads_and_angles, ()), (rms_norm, hidden_and_weight, (1e-5,))]
)
def test_rotation_and_norm_compiled_are_those_eager(function, build, more, backend):
    compiled = torch.compile(function.__wrapped__, fullgraph=True, backend=backend)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        outputs, gradients = [], []
        for call in (compiled, function.__wrapped__):
            inputs = [tensor.requires_grad_() for tensor in build(dtype)]
            outputs.append(call(*inputs, *more))
            loss = torch.cat([output.float().flatten() for output in outputs[-1]]).square().sum()
            gradients.append(torch.autograd.grad(loss, inputs))
        torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(*gradients, rtol=tolerance, atol=10 * tolerance)
