"""Measures how far the implementations of NeoBERT are apart, on one set of random weights.

The reference in plain PyTorch, the Megatron model that is trained and the Hugging Face folders that are exported are
built at any size and fed the same prompts: in fp32, in bfloat16, and in fp64 with every cast to fp32 taken out, which
leaves nothing but algebra. Two controls are wrong on purpose: figures that they do not exceed by far would prove
nothing.
"""

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from checkpoint_conversion.comparison import (
    TOLERANCES,
    Comparison,
    Prompts,
    build_prompts,
    compare_logits,
    compare_models,
    dtype_name,
    make_loud,
    reference_model,
)
from checkpoint_conversion.hf_config import LAYOUTS
from checkpoint_conversion.hf_model import load_logit_model
from checkpoint_conversion.hf_writer import FolderSpec, write_folder
from checkpoint_conversion.mapping import NEOBERT, to_internal
from checkpoint_conversion.megatron_io import model_shape, reference_config
from checkpoint_conversion.tensor_rules import COPY, PAIR_ADJACENT
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.model.reference import ReferenceNeoBERT
from megatron_neobert.runtime import distributed

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The names that the norms have in a model built of megatron.core's own classes, and in every checkpoint.
_NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class Measurement(NamedTuple):
    """One line of the table."""

    what: str
    comparison: Comparison
    dtype: torch.dtype = torch.float32
    is_control: bool = False

    @property
    def as_expected(self) -> bool:
        """Equal within the tolerance of its precision; a control the opposite, by a factor of 100."""
        if self.is_control:
            return not self.comparison.within(100 * TOLERANCES[self.dtype])
        return self.comparison.within(TOLERANCES[self.dtype])


class InFloat64(TorchFunctionMode):
    """While it is open, what would be cast to fp32 is cast to fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.view:  # bytes of a file that holds fp32
            return func(*args, **(kwargs or {}))
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@torch.no_grad()
def measure_parity(settings: Settings, *, vocab_size: int) -> list[Measurement]:
    """Builds all implementations with the same weights and compares each with the reference on a padded batch.

    Joins a process group of one rank for a while, because Megatron needs one.
    """
    shape = model_shape(settings, vocab_size=vocab_size)
    reference = make_loud(ReferenceNeoBERT(reference_config(settings, vocab_size=vocab_size)))
    tensors = to_internal(reference.state_dict(), shape, NEOBERT)
    unpermuted_table = tuple(replace(entry, rule=COPY) if entry.rule is PAIR_ADJACENT else entry for entry in NEOBERT)
    unpermuted = to_internal(reference.state_dict(), shape, unpermuted_table)

    max_tokens = settings.model.max_position_embeddings
    prompts = build_prompts(vocab_size, longest=max_tokens)
    expected_bsv = reference(*prompts)
    precise = {torch.float64: copy.deepcopy(reference).double()}
    sources = {
        dtype: reference_model(precise.get(dtype, reference), max_tokens=max_tokens)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    }

    def measure(what: str, logits_bsv: Tensor, *, is_control: bool = False) -> Measurement:
        comparison = compare_logits(expected_bsv, logits_bsv, prompts.attention_mask_bs)
        return Measurement(what, comparison, is_control=is_control)

    measurements = [
        measure("reference, packed", prompts.unpack(reference.forward_packed(*prompts.packed))),
        measure("Megatron model, packed", prompts.unpack(run_megatron(settings, tensors, prompts, vocab_size))),
    ]
    for layout in LAYOUTS:
        with exported(settings, tensors, vocab_size, layout) as folder:
            for dtype, source in sources.items():
                with InFloat64() if dtype is torch.float64 else nullcontext():
                    checks = compare_models(source, load_logit_model(folder, dtype), prompts)
                measurements += [
                    Measurement(f"{layout}, {how}, {dtype_name(dtype)}", check, dtype) for how, check in checks.items()
                ]
    measurements.append(measure("control: padding attended to", reference(prompts.tokens_bs), is_control=True))
    with exported(settings, unpermuted, vocab_size, "eurobert") as folder:
        logits_bsv = load_logit_model(folder).padded(*prompts)
        measurements.append(measure("control: rotary pairs not permuted", logits_bsv, is_control=True))
    return measurements


def run_megatron(settings: Settings, tensors: dict[str, Tensor], prompts: Prompts, vocab_size: int) -> Tensor:
    """Logits [t, v] of the Megatron model holding `tensors`, on the GPU where there is one."""
    device = distributed.initialize(settings)
    try:
        model = NeoBERTModel(settings, vocab_size=vocab_size).to(device).eval()
        load_into_megatron(model, tensors)
        tokens_t, starts_n = (tensor.to(device) for tensor in prompts.packed)
        longest = int(starts_n.diff().max())
        logits_tv = model(tokens_t, starts_n, longest, torch.arange(len(tokens_t), device=device))
        return logits_tv[:, :vocab_size].float().cpu()
    finally:
        distributed.shut_down()


def load_into_megatron(model: NeoBERTModel, tensors: dict[str, Tensor]) -> None:
    """Copies weights under the internal names of mapping.py into a model that no parallelism splits."""
    for name, parameter in model.named_parameters():
        for own, stored in _NORM_NAMES.items():
            name = name.replace(own, stored)
        parameter.data.copy_(tensors[name])


@contextmanager
def exported(settings: Settings, tensors: dict[str, Tensor], vocab_size: int, layout: str) -> Iterator[Path]:
    """The folder that a conversion of `tensors` writes, for as long as the block lasts; nothing is compared."""
    with tempfile.TemporaryDirectory() as place:
        vocabulary, target = Path(place) / "vocab.txt", Path(place) / "model"
        words = [f"w{number}" for number in range(vocab_size - len(_SPECIAL))]
        vocabulary.write_text("".join(f"{word}\n" for word in (*_SPECIAL, *words)), encoding="utf-8")
        spec = FolderSpec(settings.model, model_shape(settings, vocab_size=vocab_size), load_tokenizer(vocabulary))
        target.mkdir()
        write_folder(target, layout, spec, tensors)
        yield target
