"""What a fork server has imported whose children compute with Transformer Engine, on an H200 as far as they see."""

import contextlib
import types

import emulated_engine

emulated_engine.install()

import preloaded  # noqa: E402, F401
from megatron.core.distributed import param_and_grad_buffer  # noqa: E402

from megatron_neobert.model import kernels  # noqa: E402

hardware = kernels.Hardware(
    gpu=emulated_engine.GPU,
    capability=emulated_engine.CAPABILITY,
    transformer_engine=kernels.Library(version="2 or newer, over an emulated extension"),
)
kernels.detect_hardware = lambda: hardware

# Weights in FP8 and in bf16 are gathered together. gloo would make one tensor of them, in the type of the first; so
# each collective is carried out at once, which is right where none is overlapped.
param_and_grad_buffer._coalescing_manager = lambda *args, **kwargs: contextlib.nullcontext(
    types.SimpleNamespace(wait=lambda: None)
)
