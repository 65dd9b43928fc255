"""The part of Transformer Engine that megatron.core's layers are built from, in plain torch on the CPU.

Transformer Engine cannot run without a GPU. What can be tested without one is everything around it: which classes our
layer specs choose, which arguments reach them, what they are called in a checkpoint, and that the model computes the
same with them. So the classes here have the names, signatures, parameters and refusals of Transformer Engine 2.11.0,
compared by hand with its source, and their arithmetic is torch's; tests/gpu/test_transformer_engine.py compares the
signatures again where the real package is installed.

Sources (transformer-engine 2.11.0): pytorch/module/linear.py `Linear`, pytorch/module/layernorm_linear.py
`LayerNormLinear`, pytorch/module/{rmsnorm,layernorm}.py, pytorch/ops/basic/{rmsnorm,layer_norm}.py,
pytorch/attention/dot_product_attention/dot_product_attention.py `DotProductAttention`, pytorch/module/base.py
`get_extra_state`, pytorch/cross_entropy.py.

`install` comes before the first import of megatron.core, hence in a process of its own.
"""

import importlib.machinery
import math
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VERSION = "2.11.0"


class TransformerEngineBaseModule(nn.Module):
    """Keeps the state of FP8 scaling, which is empty without FP8, as an extra entry of the state dict."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0, "there is no FP8 state on a CPU"


class Linear(TransformerEngineBaseModule):
    """y = x W^T, cut over tensor-parallel ranks by columns or rows of Megatron's speech."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.save_original_input = save_original_input
        self._build_linear(
            in_features, out_features, sequence_parallel, tp_group, tp_size, bias, return_bias, parallel_mode,
            params_dtype=params_dtype, device=device, init_method=init_method,
        )  # fmt: skip
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._refuse(parameters_split, delay_wgrad_compute, symmetric_ar_type, ub_name)

    def _build_linear(
        self, in_features, out_features, sequence_parallel, tp_group, tp_size, bias, return_bias, parallel_mode, *,
        params_dtype, device, init_method,
    ) -> None:  # fmt: skip
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        assert parallel_mode in ("row", "column", None), f"parallel_mode {parallel_mode} not supported"
        self.parallel_mode = parallel_mode
        assert in_features % self.tp_size == out_features % self.tp_size == 0, f"{in_features=} {out_features=}"
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        assert not bias and not return_bias, "NeoBERT's layers have no bias; this stand-in knows none"
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=params_dtype, device=device))
        self.bias = torch.empty(0, dtype=params_dtype, device=device)
        init_method(self.weight)
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = 1 if parallel_mode == "row" else 0
        self.weight.partition_stride = 1

    @staticmethod
    def _refuse(*wanted: Any) -> None:
        assert not any(wanted), f"{wanted=}: this stand-in has no overlap"

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        assert not fp8_output and not fp8_grad, "FP8 needs a GPU"
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                inp = mappings.gather_from_sequence_parallel_region(inp, tensor_parallel_output_grad=True)
            else:
                inp = mappings.copy_to_tensor_model_parallel_region(inp)
        if self.fuse_wgrad_accumulation:
            output = _AccumulatingProduct.apply(inp, self.weight)
        else:
            output = torch.matmul(inp, self.weight.t())
        if self.parallel_mode == "row":
            if self.sequence_parallel:
                return mappings.reduce_scatter_to_sequence_parallel_region(output)
            return mappings.reduce_from_tensor_model_parallel_region(output)
        return output


class _AccumulatingProduct(torch.autograd.Function):
    """The weight's gradient is added to `main_grad` in its dtype; what autograd gets in its place is not to be used."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inp, weight)
        return torch.matmul(inp, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inp, weight = ctx.saved_tensors
        main_grad = weight.main_grad
        main_grad.add_(gradient.flatten(0, -2).to(main_grad.dtype).t() @ inp.flatten(0, -2).to(main_grad.dtype))
        weight.grad_added_to_main_grad = True
        return torch.matmul(gradient, weight), torch.full_like(weight, torch.nan)


class LayerNormLinear(Linear):
    """A norm and the linear layer behind it, as one module with the norm's weight under `layer_norm_`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        TransformerEngineBaseModule.__init__(self)
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        self.normalization, self.eps = normalization, eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=params_dtype, device=device))
        self.layer_norm_bias = (
            nn.Parameter(torch.zeros(in_features, dtype=params_dtype, device=device))
            if normalization == "LayerNorm"
            else None
        )
        self._build_linear(
            in_features, out_features, sequence_parallel, tp_group, tp_size, bias, return_bias, parallel_mode,
            params_dtype=params_dtype, device=device, init_method=init_method,
        )  # fmt: skip
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self._refuse(
            parameters_split, delay_wgrad_compute, symmetric_ar_type, ub_name,
            return_layernorm_output, return_layernorm_output_gathered, zero_centered_gamma,
        )  # fmt: skip

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:
        if self.normalization == "LayerNorm":
            inp = F.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.layer_norm_bias, self.eps)
        else:
            inp = F.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(inp, is_first_microbatch, fp8_output, fp8_grad)


class _Norm(TransformerEngineBaseModule):
    """Options behind those of the legacy signature are the operation's: device, dtype, sm_margin."""

    has_bias: ClassVar[bool]

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        unknown = set(kwargs) - {"device", "dtype", "sm_margin"}
        if unknown:
            raise TypeError(f"{type(self).__name__} got unexpected keyword arguments {sorted(unknown)}")
        assert not zero_centered_gamma, "NeoBERT's norm weights are centered at one"
        size = normalized_shape if hidden_size is None else hidden_size
        self.eps, device = eps, kwargs.get("device", "cuda")
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel
        if self.has_bias:
            self.bias = nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))
            self.bias.sequence_parallel = sequence_parallel


class RMSNorm(_Norm):
    has_bias = False

    def forward(self, inp: Tensor) -> Tensor:
        return F.rms_norm(inp, inp.shape[-1:], self.weight, self.eps)


class LayerNorm(_Norm):
    has_bias = True

    def forward(self, inp: Tensor) -> Tensor:
        return F.layer_norm(inp, inp.shape[-1:], self.weight, self.bias, self.eps)


class DotProductAttention(TransformerEngineBaseModule):
    """Packed attention (thd); what else the real class can do is refused. Remembers what it was called with."""

    calls: ClassVar[list[dict[str, Any]]] = []

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        super().__init__()
        assert attention_type == "self" and softmax_type == "vanilla" and attention_dropout == 0.0
        assert window_size is None and cp_group is None and not return_max_logit
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        assert num_attention_heads % groups == 0, "The number of heads must be divisible by the number of GQA groups!"
        self.groups_of_rank = groups // (tp_size if tp_group is None else tp_group.size())
        self.width, self.scale = kv_channels, softmax_scale or 1.0 / math.sqrt(kv_channels)
        self.attn_mask_type = attn_mask_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        num_splits: int | None = 1,
    ) -> Tensor:
        mask = attn_mask_type or self.attn_mask_type
        assert key_layer.shape[:-1] == value_layer.shape[:-1], "Keys and values must have the same number of heads!"
        assert query_layer.shape[-1] == self.width, f"{query_layer.shape=}, but expected head_dim = {self.width}!"
        assert key_layer.shape[-2] == self.groups_of_rank, f"{key_layer.shape=}, but {self.groups_of_rank=}"
        assert qkv_format == "thd", f"{qkv_format=}: this stand-in is for packed rows"
        assert all(layer.dim() == 3 for layer in (query_layer, key_layer, value_layer)), "must be 3D tensors for thd!"
        assert "padding" in mask, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape, "cu_seqlens_q and cu_seqlens_kv must have the same shape!"
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32, "cu_seqlens must be in dtype torch.int32!"
        assert attention_mask is None and core_attention_bias is None
        call = {"mask": mask, "mask_of_init": self.attn_mask_type, "max_seqlen": max_seqlen_q}
        self.calls.append({**call, "padded": cu_seqlens_q_padded})
        return self._attend(query_layer, key_layer, value_layer, cu_seqlens_q.diff().tolist(), "causal" in mask)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], causal: bool) -> Tensor:
        contexts = []
        for document in zip(*(layer.split(lengths) for layer in (query, key, value)), strict=True):
            if len(document[0]):
                heads_first = [layer.transpose(0, 1).unsqueeze(0) for layer in document]
                context = F.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=self.scale)
                contexts.append(context.squeeze(0).transpose(0, 1).flatten(1))
        return torch.cat(contexts)


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: Tensor | None = None,
) -> Tensor:
    """One rank alone. The real one also overwrites `inp` with its gradient."""
    assert inp.dim() == 3 and target.numel() == inp.shape[0] * inp.shape[1], "Each token needs a target token ID."
    assert dist_process_group is None or dist_process_group.size() == 1
    assert label_smoothing == 0.0 and not reduce_loss and _input is None
    losses = F.cross_entropy(inp.flatten(0, 1).float(), target.flatten(), ignore_index=ignore_idx, reduction="none")
    return losses.view(target.shape)


class _Absent:
    """Stands where megatron.core wants a class to inherit from or to name, on no path of this model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} is not part of this stand-in for Transformer Engine")


def _absent(name: str) -> type:
    return type(name, (_Absent,), {})


def install() -> None:
    """Makes `import transformer_engine` find this file's classes."""
    assert "megatron.core" not in sys.modules, "megatron.core looks for Transformer Engine once, when it is imported"
    recipes = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "Format")
    quantization: dict[str, Any] = dict.fromkeys(("fp8_autocast", "fp8_model_init"), nullcontext)
    quantization["FP8GlobalStateManager"] = _absent("FP8GlobalStateManager")
    _add_module("transformer_engine", __version__=VERSION)
    _add_module("transformer_engine.common")
    _add_module("transformer_engine.common.recipe", **{name: _absent(name) for name in recipes})
    _add_module(
        "transformer_engine.pytorch",
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        RMSNorm=RMSNorm,
        LayerNorm=LayerNorm,
        DotProductAttention=DotProductAttention,
        GroupedLinear=_absent("GroupedLinear"),
        **quantization,
    )
    _add_module("transformer_engine.pytorch.fp8", **quantization)
    _add_module("transformer_engine.pytorch.cross_entropy", parallel_cross_entropy=parallel_cross_entropy)
    _add_module(
        "transformer_engine.pytorch.distributed",
        CudaRNGStatesTracker=_absent("CudaRNGStatesTracker"),
        activation_recompute_forward=_absent("activation_recompute_forward"),
    )
    _add_module("transformer_engine.pytorch.tensor", QuantizedTensor=_absent("QuantizedTensor"))
    operations = {name: _absent(name) for name in ("Sequential", "FusibleOperation")}
    _add_module("transformer_engine.pytorch.ops", **operations)
    routing = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    _add_module("transformer_engine.pytorch.router", **dict.fromkeys(routing))


def _add_module(name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []  # a package: what is missing below it is an ImportError, as Megatron expects of old versions
    module.__dict__.update(contents)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
