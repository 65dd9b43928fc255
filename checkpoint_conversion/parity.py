"""Measures how far the implementations of NeoBERT are apart, on one set of random weights.

The reference in plain PyTorch, the Megatron model that is trained and the Hugging Face model that is exported are
built at any size and fed the same prompts in fp32. Two controls are wrong on purpose: figures that they do not exceed
by far would prove nothing.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from checkpoint_conversion.comparison import (
    FP32_TOLERANCE,
    Comparison,
    Prompts,
    build_prompts,
    compare_logits,
    make_loud,
)
from checkpoint_conversion.eurobert import load_masked_lm
from checkpoint_conversion.export import write_weights
from checkpoint_conversion.mapping import COPY, NEOBERT, PAIR_ADJACENT, to_internal
from checkpoint_conversion.megatron_reader import MegatronCheckpoint, model_shape, reference_config
from megatron_neobert import distributed
from megatron_neobert.config import Settings
from megatron_neobert.data.tokenizer import load_tokenizer
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.model.reference import ReferenceNeoBERT

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# The names that the norms have in a model built of megatron.core's own classes, and in every checkpoint.
_NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class PackedPrompts(NamedTuple):
    """Documents end to end: token ids, and where each starts, with their number of tokens at the end."""

    tokens_t: Tensor
    cu_seqlens_n: Tensor


class Measurement(NamedTuple):
    """One line of the table."""

    what: str
    comparison: Comparison
    is_control: bool = False

    @property
    def as_expected(self) -> bool:
        """Equal within the tolerance of a conversion; a control the opposite, by a factor of 100."""
        if self.is_control:
            return not self.comparison.within(100 * FP32_TOLERANCE)
        return self.comparison.within(FP32_TOLERANCE)


@torch.no_grad()
def measure_parity(settings: Settings, *, vocab_size: int) -> list[Measurement]:
    """Builds all implementations with the same weights and compares each with the reference on a padded batch.

    Joins a process group of one rank for a while, because Megatron needs one.
    """
    shape = model_shape(settings, vocab_size=vocab_size)
    reference = make_loud(ReferenceNeoBERT(reference_config(settings, vocab_size=vocab_size)))
    tensors = to_internal(reference.state_dict(), shape, NEOBERT)
    unpermuted_table = tuple(replace(row, rule=COPY) if row.rule is PAIR_ADJACENT else row for row in NEOBERT)
    unpermuted = to_internal(reference.state_dict(), shape, unpermuted_table)

    prompts = build_prompts(vocab_size, longest=settings.model.max_position_embeddings)
    packed = pack_prompts(prompts)
    expected_bsv = reference(*prompts)

    def padded(logits_bsv: Tensor) -> Comparison:
        return compare_logits(expected_bsv, logits_bsv, prompts.attention_mask_bs)

    def in_a_row(logits_tv: Tensor) -> Comparison:
        logits_bsv = torch.zeros_like(expected_bsv)
        logits_bsv[prompts.attention_mask_bs.bool()] = logits_tv
        return padded(logits_bsv)

    return [
        Measurement("reference, packed row", in_a_row(reference.forward_packed(*packed))),
        Measurement("Megatron model, packed row", in_a_row(run_megatron(settings, tensors, packed, vocab_size))),
        Measurement("EuroBERT from disk, padded", padded(_run_export(settings, tensors, prompts, vocab_size))),
        Measurement("control: padding attended to", padded(reference(prompts.tokens_bs)), is_control=True),
        Measurement(
            "control: rotary pairs not permuted",
            padded(_run_export(settings, unpermuted, prompts, vocab_size)),
            is_control=True,
        ),
    ]


def to_text(measurements: list[Measurement]) -> str:
    """The table: one line per measurement, each against the reference on a padded batch."""
    header = (
        f"{'against the reference, padded':<36} {'largest diff.':>13} {'relative':>9} {'cosine':>11} {'same token':>10}"
    )
    lines = [
        f"{what:<36} {figures.max_abs:>13.2e} {figures.relative:>9.1e} {figures.cosine:>11.8f} "
        f"{figures.argmax_agreement:>10.1%}"
        for what, figures, _ in measurements
    ]
    return "\n".join([header, *lines])


def pack_prompts(prompts: Prompts) -> PackedPrompts:
    """The prompts end to end, without padding."""
    present = prompts.attention_mask_bs.bool()
    starts_n = torch.nn.functional.pad(present.sum(1).cumsum(0), (1, 0))
    return PackedPrompts(prompts.tokens_bs[present], starts_n.int())


def run_megatron(settings: Settings, tensors: dict[str, Tensor], packed: PackedPrompts, vocab_size: int) -> Tensor:
    """Logits [t, v] of the Megatron model holding `tensors`, on the GPU where there is one."""
    device = distributed.initialize(settings)
    try:
        model = NeoBERTModel(settings, vocab_size=vocab_size).to(device).eval()
        load_into_megatron(model, tensors)
        tokens_t, starts_n = (tensor.to(device) for tensor in packed)
        longest = int(packed.cu_seqlens_n.diff().max())
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


def _run_export(settings: Settings, tensors: dict[str, Tensor], prompts: Prompts, vocab_size: int) -> Tensor:
    """Logits [b, s, v] of the folder that a conversion of `tensors` writes, as transformers loads it."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.txt"
        words = [f"w{number}" for number in range(vocab_size - len(_SPECIAL))]
        vocabulary.write_text("".join(f"{word}\n" for word in (*_SPECIAL, *words)), encoding="utf-8")
        tokenizer = load_tokenizer(vocabulary)
        checkpoint = MegatronCheckpoint(Path(folder), settings, tokenizer, tensors)
        exported = Path(folder) / "model"
        exported.mkdir()
        write_weights(checkpoint, exported, tokenizer, torch.float32)
        return load_masked_lm(exported)(*prompts).logits
