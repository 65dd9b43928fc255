"""Imports of a fork server whose children use the emulated Transformer Engine and an emulated H200."""

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

# A coalesced collective gathers weights in FP8 and bf16, and gloo would convert all to the first type. So each
# collective runs at once, which is correct because none is overlapped.
param_and_grad_buffer._coalescing_manager = lambda *args, **kwargs: contextlib.nullcontext(
    types.SimpleNamespace(wait=lambda: None)
)
