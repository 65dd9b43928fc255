"""Functions of Transformer Engine's extension that forward, backward and optimizer of this model call, in torch."""

import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from emulated_engine.fp8 import is_quantized, make_empty, quantize, torch_dtype, values_of


def get_cudnn_version() -> int:
    return 91900


def generic_gemm(
    A: Any, transA: bool, B: Any, transB: bool, D: Tensor | None, quantizer: Any, output_dtype: Any, bias: Any,
    bias_type: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Any, workspace_size: int, accumulate: bool,
    use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None, extra_output: Any = None,
    bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute D = op(B) op(A) with fp32 sums. FP8 tensor cores with split accumulators are nearly as exact."""
    assert comm_overlap is None and not gelu and quantizer is None and bias is None, "not emulated"
    assert is_quantized(A) == is_quantized(B), "no kernel has one operand in FP8 and another one not in FP8"
    left, right = values_of(B, columnwise=transB), values_of(A, columnwise=not transA)
    left, right = (left.t() if transB else left), (right.t() if transA else right)
    if is_quantized(A):  # cublaslt_gemm.cu, CanonicalizeGemmInput
        assert left.shape[1] % 16 == 0, f"FP8 product over {left.shape[1]} values: must be a multiple of 16"
    else:
        assert A.dtype == B.dtype, f"no kernel has operands of {A.dtype} and {B.dtype}"
    product = alpha * (left @ right)
    dtype = torch_dtype(output_dtype) if output_dtype is not None else A.dtype
    if D is not None:
        assert D.dtype == dtype, f"product into {D.dtype}, not {dtype}"
        D.copy_(product + D.float() if accumulate else product)
    elif transB:
        D = product.to(dtype)
    else:
        D = product.to(dtype).view(*(B.shape if isinstance(B, Tensor) else B.size())[:-1], product.shape[-1])
    return D, None, None, extra_output


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, ...]:  # fmt: skip
    values = input.detach().float()
    rsigma = torch.rsqrt(values.square().mean(-1) + eps)
    normed = values * rsigma[:, None] * weight.detach().float()
    return _quantized(normed, quantizer, torch_dtype(otype)), None, rsigma


def _quantized(values: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    if quantizer is None:
        return values.to(dtype)
    if type(quantizer).__name__ == "Float8Quantizer":  # delayed scales are known, so one kernel quantizes from fp32
        return quantize(values, quantizer, make_empty(quantizer, list(values.shape), dtype))
    return quantize(values.to(dtype), quantizer)


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    normed, weighted = x.float() * rsigma[:, None], dz.float() * gamma.float()
    dx = rsigma[:, None] * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: Any, sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, ...]:  # fmt: skip
    values = input.detach().float()
    mu, rsigma = values.mean(-1), torch.rsqrt(values.var(-1, correction=0) + eps)
    normed = (values - mu[:, None]) * rsigma[:, None] * weight.detach().float() + bias.detach().float()
    return _quantized(normed, quantizer, torch_dtype(otype)), mu, rsigma


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normed, weighted = (x.float() - mu[:, None]) * rsigma[:, None], dz.float() * gamma.float()
    centred = weighted - weighted.mean(-1, keepdim=True)
    dx = rsigma[:, None] * (centred - normed * (weighted * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype), dz.float().sum(0).to(gamma.dtype)


def swiglu(input: Tensor, quantizer: Any) -> Any:
    gate, linear = input.detach().float().chunk(2, dim=-1)
    return _quantized(F.silu(gate) * linear, quantizer, input.dtype)


def dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
    gate, linear = fwd_input.float().chunk(2, dim=-1)
    sigmoid, grad_of_product = gate.sigmoid(), grad.float()
    grad_of_gate = grad_of_product * linear * sigmoid * (1 + gate * (1 - sigmoid))
    gradient = torch.cat((grad_of_gate, grad_of_product * gate * sigmoid), dim=-1)
    return _quantized(gradient, quantizer, fwd_input.dtype)


# Order of arguments in csrc/extensions.h of 2.11.0 and 2.20.2.
_FORWARD = {
    "2.11": "max_q max_kv training scale dropout set_zero layout bias_type mask softmax window cu_seqlens_q "
    "cu_seqlens_kv q k v dtype padded_q padded_kv page_k page_v s_quantizer o_quantizer bias sinks rng rng_elements "
    "max_logit graph",
    "2.20": "max_q max_kv training scale dropout set_zero layout o_format scale_format bias_type mask softmax window "
    "bottom_right cu_seqlens_q cu_seqlens_kv q k v dtype padded_q padded_kv page_k page_v s_quantizer o_quantizer bias "
    "sinks rng rng_elements max_logit graph",
}
_BACKWARD = {
    "2.11": "max_q max_kv scale dropout set_zero layout bias_type mask softmax window deterministic cu_seqlens_q "
    "cu_seqlens_kv q k v o d_o dtype d_dtype aux padded_q padded_kv s_quantizer dp_quantizer dqkv_quantizer graph",
    "2.20": "max_q max_kv scale dropout set_zero layout o_format do_format d_layout scale_format do_scale_format "
    "bias_type mask softmax window bottom_right deterministic cu_seqlens_q cu_seqlens_kv q k v o d_o dtype aux "
    "padded_q padded_kv s_quantizer dp_quantizer dqkv_quantizer graph",
}


def get_fused_attn_backend(*arguments: Any) -> Any:
    """Return the backend for packed bfloat16 and this model, as common/fused_attn/fused_attn.cpp does.

    Packed documents need compute capability 9.0 and cuDNN 9.1, or 10.0 and cuDNN 9.7.
    """
    import transformer_engine_torch as extension

    major, _ = torch.cuda.get_device_capability()
    is_possible = major >= 9 and get_cudnn_version() >= (90_100 if major == 9 else 90_700)
    backends = extension.NVTE_Fused_Attn_Backend
    backend = backends.NVTE_F16_arbitrary_seqlen if is_possible else backends.NVTE_No_Backend
    return backend if len(arguments) > 1 else (backend, "")  # 2.20 takes one object, and also returns a reason


def _packed_call(names: dict[str, str], arguments: tuple[Any, ...]) -> Any:
    """Return the arguments by name. Assert that they fulfil cuDNN's conditions for packed documents."""
    call = types.SimpleNamespace(
        **next(
            dict(zip(order.split(), arguments, strict=True))
            for order in names.values()
            if len(order.split()) == len(arguments)
        )
    )
    assert call.layout.name in ("NVTE_THD_THD_THD", "NVTE_TH3D", "NVTE_T3HD"), call.layout.name
    assert call.mask.name in ("NVTE_PADDING_MASK", "NVTE_PADDING_CAUSAL_MASK"), call.mask.name
    call.causal = "CAUSAL" in call.mask.name
    assert call.window[0] == -1 and call.dropout == 0 and call.s_quantizer is None
    # A tensor would make the host wait for the device in each layer.
    assert isinstance(call.max_q, int), f"max_seqlen is {type(call.max_q)}"
    assert call.cu_seqlens_q.dtype == torch.int32
    assert int(call.cu_seqlens_q.diff().max()) <= call.max_q, (
        "a document is longer than max_seqlen: it would be truncated"
    )
    assert call.padded_q is None or torch.equal(call.padded_q, call.cu_seqlens_q)
    assert all(tensor.dtype in (torch.bfloat16, torch.half) for tensor in (call.q, call.k, call.v)), call.q.dtype
    return call


def fused_attn_fwd(*arguments: Any) -> list[Tensor]:
    call = _packed_call(_FORWARD, arguments)
    context = _attend(call.q.detach(), call.k.detach(), call.v.detach(), call).contiguous()
    softmax_statistics = torch.zeros(call.q.shape[0], call.q.shape[1], 1)
    return [context, softmax_statistics, torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(*arguments: Any) -> list[Any]:
    call = _packed_call(_BACKWARD, arguments)
    inputs = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
    with torch.enable_grad():
        context = _attend(*inputs, call)
    return [*torch.autograd.grad(context, inputs, call.d_o.view_as(context)), None, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    lengths = call.cu_seqlens_q.diff().tolist()
    rest = q.shape[0] - sum(lengths)
    contexts = []
    for document in zip(*(tensor[: sum(lengths)].split(lengths) for tensor in (q, k, v)), strict=True):
        # The kernels accumulate in float32. bfloat16 would also be half as fast on CPUs without bf16 instructions.
        heads = [tensor.transpose(0, 1).unsqueeze(0).float() for tensor in document]
        context = F.scaled_dot_product_attention(*heads, scale=call.scale, is_causal=call.causal)
        contexts.append(context.squeeze(0).transpose(0, 1))
    return torch.cat([*contexts, q.new_zeros(rest, *q.shape[1:])]).to(q.dtype)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)
