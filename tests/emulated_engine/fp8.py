"""FP8 of Transformer Engine's extension: saturating casts to float8, and scales per tensor or block."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

DTYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.half,
    "kBFloat16": torch.bfloat16,
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
}
_BLOCK = 128  # values along the inner dimension that share a scale: Float8BlockQuantizer.block_len


def torch_dtype(te_dtype: Any) -> torch.dtype:
    return DTYPES[te_dtype.name]


def flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _largest(te_dtype: Any) -> float:
    return torch.finfo(torch_dtype(te_dtype)).max


def _cast(values: Tensor, te_dtype: Any) -> Tensor:
    largest = _largest(te_dtype)
    return values.clamp(-largest, largest).to(torch_dtype(te_dtype)).view(torch.uint8)


def _scale_of(amax: Tensor, largest: float, *, epsilon: float, power_of_two: bool) -> Tensor:
    """Return the scale of `compute_scale_from_amax` in common/recipe/recipe_common.cuh."""
    amax = amax.clamp_min(epsilon)
    scale = torch.where((amax == 0) | ~amax.isfinite(), 1.0, largest / amax).clamp_max(torch.finfo(torch.float32).max)
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    assert noop is None or noop.item() == 0, "skipping an update is not emulated"
    if output is None:
        output = make_empty(quantizer, list(tensor.shape), tensor.dtype)
    values = flat(tensor.detach()).float()
    if type(quantizer).__name__ == "Float8BlockQuantizer":
        _quantize_blocks(values, quantizer, output)
        return output
    amax, largest = values.abs().amax().reshape(1), _largest(quantizer.dtype)
    if type(quantizer).__name__ == "Float8CurrentScalingQuantizer":
        assert not getattr(quantizer, "use_existing_amax", False), "not emulated"
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        scale = _scale_of(amax, largest, epsilon=quantizer.amax_epsilon, power_of_two=quantizer.force_pow_2_scales)
    else:
        assert type(quantizer).__name__ == "Float8Quantizer", f"{type(quantizer)} is not emulated"
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        scale = quantizer.scale
    data = _cast(values * scale, quantizer.dtype)
    output._scale_inv.copy_(1 / scale)
    if output._data is not None:
        output._data.copy_(data.view(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(data.t().reshape(output._transpose.shape))
        output._transpose_invalid = False
    return output


def _quantize_blocks(values: Tensor, quantizer: Any, output: Any) -> None:
    assert not getattr(quantizer, "all_gather_usage", False), "compact scales are not emulated"
    for operand, data, scale in (
        (values, output._rowwise_data, output._rowwise_scale_inv),
        (values.t(), output._columnwise_data, output._columnwise_scale_inv),
    ):
        if data is not None:
            blocks, inverse = _blocks(operand.contiguous(), quantizer)
            data.copy_(blocks.view(data.shape))
            assert scale.shape == inverse.shape, f"{scale.shape=} {inverse.shape=}"
            scale.copy_(inverse)


def _blocks(values: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Quantize values, [m, k], in blocks of 1 x 128 along the inner dimension, or of 128 x 128."""
    rows, inner = values.shape
    height = _BLOCK if quantizer.block_scaling_dim == 2 else 1
    padded = F.pad(values, (0, -inner % _BLOCK, 0, -rows % height))
    tiles = padded.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, height))
    scale = _scale_of(
        tiles.abs().amax((1, 3)),
        _largest(quantizer.dtype),
        epsilon=quantizer.amax_epsilon,
        power_of_two=quantizer.force_pow_2_scales,
    )
    data = _cast(tiles * scale[:, None, :, None], quantizer.dtype).flatten(2).flatten(0, 1)[:rows, :inner].contiguous()
    inverse = 1 / scale if height > 1 else (1 / scale).t()
    return data, F.pad(inverse, (0, -inverse.shape[1] % 4)).contiguous()


def _unblock(data: Tensor, inverse: Tensor, te_dtype: Any, *, two_d: bool) -> Tensor:
    rows, inner = data.shape
    scale = inverse.repeat_interleave(_BLOCK, 0)[:rows] if two_d else inverse[:, :rows].t()
    return data.view(torch_dtype(te_dtype)).float() * scale.repeat_interleave(_BLOCK, 1)[:, :inner]


def make_empty(quantizer: Any, shape: list[int], dtype: torch.dtype) -> Any:
    """Return an empty quantized tensor, or only its storage if the quantizer is internal."""
    tensor = quantizer.make_empty(shape, dtype=dtype, device=torch.get_default_device())
    if not quantizer.internal or not isinstance(tensor, Tensor):
        return tensor
    names = ("Float8TensorStorage", "Float8BlockwiseQTensorStorage")
    storage = next(base for base in type(tensor).__mro__ if base.__name__ in names)
    return storage(**tensor.get_metadata())


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """Return an empty quantized tensor, in version 2.20, from the specifications that graph capture uses."""
    from transformer_engine.pytorch.tensor import float8_tensor

    quantizer_class = type(quantizer)
    # Float8Quantizer has no such specifications, but its tensors are the same as those of current scaling.
    if quantizer_class is float8_tensor.Float8Quantizer:
        quantizer_class = float8_tensor.Float8CurrentScalingQuantizer
    specs = quantizer_class.inner_tensor_specs(quantizer, tuple(shape))
    inner = {name: torch.empty(inner_shape, dtype=inner_dtype) for name, (inner_shape, inner_dtype) in specs.items()}
    metadata = {**quantizer_class.storage_metadata(quantizer, dtype), "is_tensor": not quantizer.internal}
    return metadata["cls"].__tensor_unflatten__(inner, {**metadata, "requires_grad": False}, shape, None)


def is_quantized(tensor: Any) -> bool:
    return any(base.__name__ == "QuantizedTensorStorage" for base in type(tensor).__mro__)


def values_of(tensor: Any, *, columnwise: bool) -> Tensor:
    """Return the fp32 values, [m, k], that a product on Hopper reads from the row-wise data or the transposed copy."""
    names = {base.__name__ for base in type(tensor).__mro__}
    if "Float8TensorStorage" in names:
        if columnwise:
            has_transpose = tensor._transpose is not None and not tensor._transpose_invalid
            assert has_transpose, "this FP8 product needs a transpose that does not exist"
            transposed = tensor._transpose.reshape(tensor._transpose.shape[0], -1)
            return (transposed.view(torch_dtype(tensor._fp8_dtype)).float() * tensor._scale_inv).t()
        assert tensor._data is not None, "this FP8 product needs row-wise data that do not exist"
        return flat(tensor._data).view(torch_dtype(tensor._fp8_dtype)).float() * tensor._scale_inv
    if "Float8BlockwiseQTensorStorage" in names:
        data = tensor._columnwise_data if columnwise else tensor._rowwise_data
        assert data is not None, (
            f"this FP8 product needs {'column' if columnwise else 'row'}-wise data that do not exist"
        )
        scale = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
        data = data.reshape(data.shape[0], -1) if columnwise else flat(data)
        values = _unblock(data, scale, tensor._fp8_dtype, two_d=tensor._is_2D_scaled)
        return values.t() if columnwise else values
    return flat(tensor).float()


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    transposed = flat(input).t().reshape(input.shape[-1], *input.shape[:-1]).contiguous()
    return transposed if out is None else out.copy_(transposed)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor, amax_histories: Any, scales: Any, algorithm: str, fp8_dtype: Any, margin: float
) -> None:
    """Add the reduced amax to the history, roll the history, and update the scale, like delayed_scaling.cu."""
    offset = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        newest = amax_reduction_buffer[offset : offset + history.shape[1]]
        offset += history.shape[1]
        updated = history.clone()
        updated[0] = newest
        amax = updated.amax(0) if algorithm == "max" else updated[0]
        history.copy_(updated.roll(-1, 0))
        history[0] = 0
        new_scale = _largest(fp8_dtype) / amax / 2**margin
        new_scale = torch.where((amax > 0) & amax.isfinite(), new_scale, scale)
        scale.copy_(new_scale.clamp_max(torch.finfo(torch.float32).max))
