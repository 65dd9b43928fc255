"""The models whose speed is measured, each in every dtype, attention and layout, their batches, and one timed step.

What a model cannot compute is reported with its reason and left out, never replaced by something else. Batches hold
random tokens, the same documents in every layout, for every model and dtype. Of a step: the seconds that the device
needed, and the bytes that the step needed at most: on a GPU those of PyTorch's tensors, on a CPU the growth of the
process (resident set, Linux).

Shapes: `b` documents of a padded batch, `s` tokens. A padded batch has one document per row, filled up to the longest;
a packed one has a single packed sequence of documents end to end. Only tokens of documents count as tokens; slots
include the padding.
"""

import ctypes
import gc
import inspect
import itertools
import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.encoders import LoadOptions, count_learned_positions, load_model

WEB_MEDIAN_TOKENS = 368  # of RefinedWeb's documents
# RefinedWeb has mean / median = 640 / 368, which is exp(sigma^2 / 2) of a log-normal.
WEB_SIGMA = math.sqrt(2 * math.log(640 / WEB_MEDIAN_TOKENS))
MASKED_SHARE = 0.2  # of the tokens, as NeoBERT's pre-training
_IGNORED = -100


def draw_lengths(count: int, *, longest: int, distribution: str, seed: int) -> list[int]:
    """Tokens of each document; a larger batch begins with the documents of a smaller one.

    Args:
        distribution: full: each has `longest` tokens; web: log-normal as web pages are about, cut there.
    """
    if distribution == "full":
        return [longest] * count
    rng = random.Random(f"{seed} {longest}")
    return [min(int(rng.lognormvariate(math.log(WEB_MEDIAN_TOKENS), WEB_SIGMA)) + 1, longest) for _ in range(count)]


def build_batch(
    lengths: Sequence[int], *, layout: str, labels: bool, config: Any, seed: int, device: torch.device | str
) -> dict[str, Any]:
    """What a model is called with: documents of these lengths; with labels, a fifth of the tokens is to be predicted.

    Args:
        config: Of the model: its vocabulary, and the padding that no document may contain, because some models
            take their positions from it.
    """
    generator = torch.Generator().manual_seed(seed)
    pad, tokens = config.pad_token_id or 0, sum(lengths)
    ids_s = torch.randint(0, config.vocab_size - 1, (tokens,), generator=generator)
    ids_s += ids_s >= pad  # every token but the padding
    targets_s = torch.where(torch.rand(tokens, generator=generator) < MASKED_SHARE, ids_s, _IGNORED)
    targets_s[0] = ids_s[0]  # a loss without any token would be no loss

    def lay_out(values_s: Tensor, filling: int) -> Tensor:
        if layout == "packed":
            return values_s[None].to(device)
        return pad_sequence(list(values_s.split(list(lengths))), batch_first=True, padding_value=filling).to(device)

    inputs: dict[str, Any] = {"input_ids": lay_out(ids_s, pad)}
    if layout == "packed":
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        inputs |= {"cu_seqlens": starts.to(device), "max_seqlen": max(lengths)}
    else:
        inputs["attention_mask"] = lay_out(torch.ones_like(ids_s), 0)
    return inputs | ({"labels": lay_out(targets_s, _IGNORED)} if labels else {})


# Messages of other libraries on a GPU, and of PyTorch on a CPU, when memory is at its end.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def time_step(step: Callable[[], None], device: torch.device) -> float:
    """Run the step once, from an idle device to an idle device, and return the seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure_memory(step: Callable[[], None], device: torch.device) -> int:
    """Run the step once and return the bytes that it needs at most, without those of the weights.

    On a CPU the heap is trimmed before, so the step also pays for its pages; it is never the one that is timed.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        ctypes.CDLL(None).malloc_trim(0)  # gives the system what was freed but kept for later
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM starts anew
        before = _own_status("VmRSS")
    step()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _own_status("VmHWM")
    return max(0, peak - before)


def has_memory_for(work: Callable[[], None], device: torch.device) -> bool:
    """Does the work and returns True, or False if memory was at its end, which is free again then.

    Any other error is raised.
    """
    try:
        work()
        return True
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
    # Not in the handler: while the error lives, its traceback holds the tensors.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return False


def _own_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


FORWARD, TRAINING = "forward", "forward+backward"
_KERNEL = re.compile(r"aten::_(scaled_dot_product_\w+)|(\w*flash_attn\w*::\w+)")  # PyTorch's own, and FlashAttention's


@dataclass(frozen=True, kw_only=True)
class Variant:
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
    def longest(self) -> int | None:
        """Tokens that learned positions exist for; None where positions are computed."""
        return count_learned_positions(self.model)


def why_not(subject: Subject, layout: str) -> str | None:
    """Why the model cannot compute in this layout, at any length; None if it can."""
    forward = subject.model.base_model.forward
    if layout == "packed" and "cu_seqlens" not in inspect.signature(forward).parameters:
        return "its forward takes no cu_seqlens, the documents of a packed sequence"
    if "flash" in subject.attention and subject.dtype == "float32":
        return f"{subject.attention} computes in float16 and bfloat16 only"
    return None


def make_step(subject: Subject, inputs: dict[str, Any], passes: str) -> Callable[[], None]:
    """A function that computes these passes once."""
    model = subject.model

    def step() -> None:
        if passes == FORWARD:
            with torch.no_grad():
                model.base_model(**inputs)
        else:
            model(**inputs).loss.backward()

    return step


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


@dataclass(frozen=True)
class ModelsUnderTest:
    """What is measured, and what is not: model, variant in words, reason."""

    variants: dict[Variant, Subject]
    not_run: list[dict[str, str]]


def load_models(
    folders: Mapping[str, Path],
    *,
    dtypes: Sequence[str],
    attentions: Sequence[str | None],
    layouts: Sequence[str],
    backward: bool,
    lengths: Sequence[int],
    device: torch.device,
) -> ModelsUnderTest:
    """Every model in every dtype, attention and layout; without `backward` it needs no masked-language-model head.

    Args:
        folders: Name -> Hugging Face folder.

    Raises:
        MissingInputError, ConversionError: A model cannot be loaded as asked.
        ConfigError: Nothing is left to measure.
    """
    found = ModelsUnderTest({}, [])
    for name, dtype, attention in itertools.product(folders, dict.fromkeys(dtypes), dict.fromkeys(attentions)):
        options = LoadOptions(dtype=getattr(torch, dtype), device=device, attention=attention)
        model = load_model(folders[name], "AutoModelForMaskedLM" if backward else "AutoModel", options)
        subject = Subject(name=name, dtype=dtype, model=model)
        longest = subject.longest
        too_long = [length for length in lengths if longest is not None and length > longest]
        reason = f"has learned positions for {longest} tokens only"
        found.not_run.extend({"model": name, "variant": f"{name}, {n:,}", "reason": reason} for n in too_long)
        for layout in layouts:
            if reason_against := why_not(subject, layout):
                what = f"{name}, {dtype}, {subject.attention}, {layout}"
                found.not_run.append({"model": name, "variant": what, "reason": reason_against})
            elif len(too_long) < len(lengths):
                common = {"model": name, "dtype": dtype, "attention": subject.attention, "layout": layout}
                for passes in (FORWARD, TRAINING) if backward else (FORWARD,):
                    found.variants[Variant(**common, passes=passes)] = subject
    if not found.variants:
        reasons = "; ".join(f"{entry['variant']}: {entry['reason']}" for entry in found.not_run)
        raise ConfigError(f"nothing can be measured ({reasons}); ask for another layout, dtype or length.")
    return found
