"""Who takes part in a measurement of speed: models, each in every dtype, attention and layout that was asked for.

What a model cannot do is said with its reason and left out, never replaced by something else.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_neobert.evaluation.encoders import LoadOptions, count_learned_positions, load_masked_lm, load_model
from megatron_neobert.evaluation.throughput.batches import Batch

FORWARD, TRAINING = "forward", "forward+backward"
_KERNEL = re.compile(r"aten::_(scaled_dot_product_\w+)|(\w*flash_attn\w*::\w+)")  # PyTorch's own, and FlashAttention's


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to compute, with what it is named after."""

    model: str
    dtype: str
    attention: str  # as the loaded model calls it
    layout: str  # padded or packed
    passes: str  # FORWARD: the backbone's hidden states; TRAINING: the masked-language-model loss and its gradients


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on its device."""

    name: str
    dtype: str
    model: Any

    @property
    def attention(self) -> str:
        return str(self.model.base_model.config._attn_implementation)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in (*self.model.parameters(), *self.model.buffers()))

    @property
    def longest(self) -> int | None:
        """Tokens that learned positions exist for; None where positions are computed."""
        return count_learned_positions(self.model)

    @property
    def takes_packed(self) -> bool:
        return "cu_seqlens" in inspect.signature(self.model.base_model.forward).parameters


def load_subject(
    folder: Path, name: str, *, dtype: str, attention: str | None, device: torch.device, backward: bool
) -> Subject:
    """Loads a model; without `backward` it needs no masked-language-model head.

    Raises:
        MissingInputError, ConversionError: As `load_model`; also where the attention is not installed.
    """
    options = LoadOptions(dtype=getattr(torch, dtype), device=device, attention=attention)
    model = load_masked_lm(folder, options) if backward else load_model(folder, "AutoModel", options)
    return Subject(name=name, dtype=dtype, model=model)


def why_not(subject: Subject, layout: str) -> str | None:
    """Why the model cannot compute in this layout, at any length; None if it can."""
    if layout == "packed" and not subject.takes_packed:
        return "its forward takes no cu_seqlens, the documents of a packed row"
    if "flash" in subject.attention and subject.dtype == "float32":
        return f"{subject.attention} computes in float16 and bfloat16 only"
    return None


def make_step(subject: Subject, batch: Batch, passes: str) -> Callable[[], None]:
    """A function that computes these passes once and leaves no gradient."""
    model = subject.model

    def forward() -> None:
        with torch.no_grad():
            model.base_model(**batch.inputs)

    def forward_and_backward() -> None:
        model(**batch.inputs).loss.backward()

    return forward if passes == FORWARD else forward_and_backward


def prepare(subject: Subject, passes: str) -> None:
    """What is not part of a step: dropout as in training, and no gradients of the step before."""
    subject.model.train(passes == TRAINING)
    subject.model.zero_grad(set_to_none=True)


def find_kernels(subject: Subject, step: Callable[[], None]) -> list[str]:
    """The attention kernels that one step calls in its forward pass; "math" where PyTorch finds no fused one."""
    if subject.attention == "flex_attention":  # which cannot be watched
        return ["flex_attention"]
    with _Watch() as watch:
        step()
    return sorted(watch.kernels) or (["math"] if subject.attention == "sdpa" else [])


class _Watch(TorchDispatchMode):
    """Notes the attention operators that are called; the profiler would, too, but writes to the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _KERNEL.match(func.name())
        if found and "backward" not in func.name():
            self.kernels.add(found[1] or found[2])
        return func(*args, **(kwargs or {}))
