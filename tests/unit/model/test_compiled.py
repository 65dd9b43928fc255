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
    query_tnd, key_tnd, _ = normal(TOKENS, HEADS, 3 * WIDTH, dtype=dtype).split(
        WIDTH, dim=-1
    )  # strided, like in a layer
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


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_rotation_compiled_is_rotation_eager(backend):
    functions = rotate.__wrapped__, torch.compile(rotate.__wrapped__, fullgraph=True, backend=backend)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        inputs = [[tensor.requires_grad_() for tensor in heads_and_angles(dtype)] for _ in functions]
        eager, compiled = (function(*tensors) for function, tensors in zip(functions, inputs, strict=True))
        torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)
        for query, key in (eager, compiled):
            (query.float().square().sum() + key.float().square().sum()).backward()
        eager_gradients, gradients = ([tensor.grad for tensor in tensors] for tensors in inputs)
        torch.testing.assert_close(gradients, eager_gradients, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_norm_compiled_is_norm_eager(backend):
    functions = rms_norm.__wrapped__, torch.compile(rms_norm.__wrapped__, fullgraph=True, backend=backend)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        inputs = [[normal(TOKENS, 1, 32, dtype=dtype), 1 + normal(32, dtype=dtype)] for _ in functions]
        results = []
        for function, (hidden, weight) in zip(functions, inputs, strict=True):
            normed = function(hidden.requires_grad_(), weight.requires_grad_(), 1e-5)
            gradients = torch.autograd.grad(normed.float().square().sum(), (hidden, weight))
            results.append((normed, *gradients))
        torch.testing.assert_close(*results, rtol=tolerance, atol=10 * tolerance)
