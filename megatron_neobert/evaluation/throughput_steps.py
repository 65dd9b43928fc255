"""Batches of random documents, and one step of a model on them: its seconds, and on a GPU its memory.

Batches hold the same documents in every layout, for every model and dtype. A padded batch has one document per row,
filled up to the longest; a packed one has a single packed sequence of documents end to end.

Shapes: `b` documents of a padded batch, `s` tokens.
"""

import gc
import inspect
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_neobert.evaluation.models import count_learned_positions
from megatron_neobert.evaluation.throughput_tables import FORWARD, TRAINING

WEB_MEDIAN_TOKENS = 368  # of RefinedWeb's documents
# RefinedWeb has mean / median = 640 / 368, which is exp(sigma^2 / 2) of a log-normal.
WEB_SIGMA = math.sqrt(2 * math.log(640 / WEB_MEDIAN_TOKENS))
MASKED_SHARE = 0.2  # of the tokens, as NeoBERT's pre-training
_IGNORED = -100
# Messages of other libraries on a GPU, and of PyTorch on a CPU, when memory is at its end.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to compute."""

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
        """Tokens that learned positions exist for; None if positions are computed."""
        return count_learned_positions(self.model)


def draw_lengths(count: int, *, longest: int, distribution: str, seed: int) -> list[int]:
    """Return the tokens of each document; a larger batch begins with the documents of a smaller one.

    Args:
        distribution: full: each has `longest` tokens; web: log-normal as web pages, truncated there.
    """
    if distribution == "full":
        return [longest] * count
    rng = random.Random(f"{seed} {longest}")
    return [min(int(rng.lognormvariate(math.log(WEB_MEDIAN_TOKENS), WEB_SIGMA)) + 1, longest) for _ in range(count)]


def build_batch(
    lengths: Sequence[int], *, layout: str, labels: bool, config: Any, seed: int, device: torch.device | str
) -> dict[str, Any]:
    """Return the inputs of a model: documents of these lengths; with labels, a fifth of the tokens is predicted.

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


def time_step(step: Callable[[], None], device: torch.device) -> float:
    """Run the step once, from an idle device to an idle device, and return the seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure_memory(step: Callable[[], None], device: torch.device) -> int | None:
    """Run the step once and return the bytes that it needs at most, without those of the weights; None on a CPU."""
    if device.type != "cuda":
        step()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def has_memory_for(work: Callable[[], None], device: torch.device) -> bool:
    """Do the work and return True, or False if memory was at its end, which is free again then.

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


def why_not(subject: Subject, layout: str) -> str | None:
    """Return why the model cannot compute in this layout, at any length; None if it can."""
    forward = subject.model.base_model.forward
    if layout == "packed" and "cu_seqlens" not in inspect.signature(forward).parameters:
        return "its forward takes no cu_seqlens, the documents of a packed sequence"
    if "flash" in subject.attention and subject.dtype == "float32":
        return f"{subject.attention} computes in float16 and bfloat16 only"
    return None


def make_step(subject: Subject, inputs: dict[str, Any], passes: str) -> Callable[[], None]:
    """Return a function that computes these passes once."""
    model = subject.model

    def step() -> None:
        if passes == FORWARD:
            with torch.no_grad():
                model.base_model(**inputs)
        else:
            model(**inputs).loss.backward()

    return step


def prepare(subject: Subject, passes: str) -> None:
    """Switch dropout as the passes need it, and remove the gradients of the step before."""
    subject.model.train(passes == TRAINING)
    subject.model.zero_grad(set_to_none=True)
