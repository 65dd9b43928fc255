"""Comparison of the reference, the Megatron model and the Hugging Face exports with the same random weights.

Logits of the same prompts are compared in fp32 and bfloat16, loss and gradients of a training step of 1,024 tokens for
every kernel and FP8 recipe of this machine. Two wrong models serve as controls: a comparison that does not detect them
would prove nothing.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_conversion.checkpoint import load_into_megatron, model_shape, reference_config, stored_name
from checkpoint_conversion.compare import (
    TOLERANCES,
    Comparison,
    LogitModel,
    build_prompts,
    compare_logits,
    compare_models,
    draw_large_weights,
    load_logit_model,
)
from checkpoint_conversion.export import write_folder
from checkpoint_conversion.mapping import COPY, NEOBERT, PAIR_ADJACENT, TABLES, to_internal
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConfigError
from megatron_neobert.model.kernels import check_hardware
from megatron_neobert.model.reference import ReferenceNeoBERT, mlm_loss

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTROL = "control: "
# Tokens of the documents of a step. Their sum is a multiple of 128, as every FP8 recipe needs.
LENGTHS = (5, 1, 250, 128, 640)
LOCAL, ENGINE = {"transformer_impl": "local"}, {"transformer_impl": "transformer_engine"}
FP8 = {name: {**ENGINE, "fp8_format": "hybrid", "fp8_recipe": name} for name in ("tensorwise", "delayed", "blockwise")}
# Name -> compute settings, bf16, key of STEP_TOLERANCES, and whether attention is causal.
STEPS: dict[str, tuple[dict[str, Any], bool, str, bool]] = {
    "local layers, float32": (LOCAL, False, "float32", False),
    "local layers, float32, causal": (LOCAL, False, "float32", True),
    "local layers, bfloat16": (LOCAL, True, "bfloat16", False),
    "local layers, bfloat16, causal": (LOCAL, True, "bfloat16", True),
    "Transformer Engine, bfloat16": (ENGINE, True, "bfloat16", False),
    "Transformer Engine, bfloat16, causal": (ENGINE, True, "bfloat16", True),
    **{f"FP8 {name}": (compute, True, "FP8", False) for name, compute in FP8.items()},
}


@dataclass(frozen=True)
class StepGap:
    """Difference between a training step and the reference."""

    loss: float  # relative
    gradient: float  # 1 - cosine similarity, of the tensor with the largest value
    tensor: str = ""  # name of that tensor

    def within(self, factor: float, tolerance: "StepGap") -> bool:
        """Return True if both differences are at most `factor` times the tolerance; False for NaN."""
        return self.loss <= factor * tolerance.loss and self.gradient <= factor * tolerance.gradient


# Measured at 28 x 256 on a CPU, Transformer Engine with an emulated extension (loss, gradient): float32 6e-8, 2e-7;
# bfloat16 2.5e-4, 1.2e-3; FP8 2.2e-3, 0.10 (blockwise; other recipes 0.08). A wrong rotary convention: 1.4e-2, 0.80.
# At 28 x 768 on an H200: docs/performance.md.
STEP_TOLERANCES = {"float32": StepGap(1e-5, 1e-5), "bfloat16": StepGap(1e-2, 1e-2), "FP8": StepGap(1e-2, 0.3)}


def measure_parity(settings: Settings, *, vocab_size: int) -> Iterator[tuple[str, Comparison, float]]:
    """Give all models the same random weights, and compare their logits with the reference's on a padded batch.

    Gradients are switched off in this process. Process groups of one rank are created for Megatron and destroyed again.

    Yields:
        Name of the comparison, its result, and the tolerance of its precision. Comparisons whose names start with
        CONTROL use wrong models, and must differ by more than 100 times the tolerance.
    """
    torch.set_grad_enabled(False)
    fp32 = TOLERANCES[torch.float32]
    reference, tensors, wrong = draw_reference(settings, vocab_size)
    prompts = build_prompts(vocab_size, longest=settings.model.max_position_embeddings)

    source = LogitModel(
        "reference", vocab_size, reference, reference.forward_packed, settings.model, reference.state_dict
    )

    def megatron_logits(tokens_t: Tensor, starts_n: Tensor) -> Tensor:
        with megatron_model(settings, tensors, vocab_size) as (model, device):
            inputs = (tokens_t, starts_n, torch.arange(len(tokens_t)))
            tokens_t, starts_n, positions_t = (tensor.to(device) for tensor in inputs)
            logits_tv = model.eval()(tokens_t, starts_n, int(starts_n.diff().max()), positions_t)
            return logits_tv[:, :vocab_size].float().cpu()

    packed = {"reference, packed": reference.forward_packed, "Megatron model, packed": megatron_logits}
    expected_bsv = reference(*prompts)
    for name, function in packed.items():
        logits_bsv = prompts.unpack(function(*prompts.packed))
        yield name, compare_logits(expected_bsv, logits_bsv, prompts.attention_mask_bs), fp32
    for layout in TABLES:
        with exported(settings, tensors, vocab_size, layout) as folder:
            for dtype, tolerance in TOLERANCES.items():
                checks = compare_models(source, load_logit_model(folder, dtype))
                for form, comparison in checks.items():  # padded and packed
                    yield f"{layout}, {form}, {str(dtype).removeprefix('torch.')}", comparison, tolerance
    unmasked_bsv = reference(prompts.tokens_bs)
    yield f"{CONTROL}padding attended to", compare_logits(expected_bsv, unmasked_bsv, prompts.attention_mask_bs), fp32
    with exported(settings, wrong, vocab_size, "eurobert") as folder:
        comparison = compare_models(source, load_logit_model(folder))["padded"]
        yield f"{CONTROL}rotary pairs not permuted", comparison, fp32


def draw_reference(settings: Settings, vocab_size: int) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Return a reference model with large random weights, its weights under Megatron's names, and wrong weights.

    The wrong weights have unpermuted rotary dimensions. They are a control that every comparison must detect.
    """
    shape = model_shape(settings, vocab_size=vocab_size)
    reference = draw_large_weights(ReferenceNeoBERT(reference_config(settings, vocab_size=vocab_size)))
    wrong_table = tuple(replace(entry, rule=COPY) if entry.rule is PAIR_ADJACENT else entry for entry in NEOBERT)
    tensors, wrong = (to_internal(reference.state_dict(), shape, table) for table in (NEOBERT, wrong_table))
    return reference, tensors, wrong


def measure_steps(settings: Settings, *, vocab_size: int) -> Iterator[tuple[str, StepGap | str, StepGap]]:
    """Compute loss and gradients of one packed sequence with every kernel, and compare them with the reference in fp32.

    Yields:
        Name of the kernel, the difference (or the reason why this machine cannot run the kernel), and the tolerance.
        The names of the last two items start with CONTROL. These items use wrong weights or a causal reference for
        bidirectional attention, and must exceed 100 times the tolerance.
    """
    generator = torch.Generator().manual_seed(1)
    tokens_t = torch.randint(vocab_size, (sum(LENGTHS),), generator=generator)
    labels_t = torch.randint(vocab_size, (sum(LENGTHS),), generator=generator)
    starts_n = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions_m = torch.arange(sum(LENGTHS))[::4]
    sequence = (tokens_t, starts_n, max(LENGTHS), positions_m, labels_t[positions_m])
    reference, tensors, wrong = draw_reference(settings, vocab_size)
    expected: dict[bool, tuple[float, dict[str, Tensor]]] = {}  # loss and gradients, by causal or not
    for is_causal in (False, True):
        reference.zero_grad()
        with torch.enable_grad():
            logits_tv = reference.forward_packed(tokens_t, starts_n, is_causal=is_causal)
            total, _ = mlm_loss(logits_tv[positions_m], sequence[-1])
            total.backward()
        # The conversion rules only move values, so they apply to gradients as well.
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        shape = model_shape(settings, vocab_size=vocab_size)
        expected[is_causal] = total.detach().item(), to_internal(gradients, shape, NEOBERT)

    def compare(
        kernel_settings: Settings, weights: Mapping[str, Tensor], *, is_causal: bool = False, against: bool = False
    ) -> StepGap:
        with megatron_model(kernel_settings, weights, vocab_size) as (model, device), torch.enable_grad():
            inputs = (value.to(device) if isinstance(value, torch.Tensor) else value for value in sequence)
            losses_m, _ = model(*inputs, is_causal=is_causal)
            losses_m.sum().backward()
            gradients = {stored_name(name): weight.grad.float().cpu() for name, weight in model.named_parameters()}
            loss = float(losses_m.detach().double().sum())
        expected_loss, expected_gradients = expected[against]
        angles = {
            name: 1 - torch.cosine_similarity(gradients[name].flatten(), gradient.flatten(), dim=0, eps=0).item()
            for name, gradient in expected_gradients.items()
        }
        worst = max(angles, key=lambda name: angles[name])
        return StepGap(abs(loss / expected_loss - 1), angles[worst], worst)

    for name, (compute, bf16, precision, is_causal) in STEPS.items():
        kernel_settings = settings.with_section("compute", **compute).with_section("training", bf16=bf16)
        try:
            check_hardware(kernel_settings)
        except ConfigError as error:
            yield name, error.problems[0], STEP_TOLERANCES[precision]
            continue
        gap = compare(kernel_settings, tensors, is_causal=is_causal, against=is_causal)
        yield name, gap, STEP_TOLERANCES[precision]
    exact = STEP_TOLERANCES["float32"]
    yield f"{CONTROL}rotary pairs not permuted", compare(settings, wrong), exact
    yield f"{CONTROL}not causal", compare(settings, tensors, against=True), exact


@contextmanager
def megatron_model(settings: Settings, tensors: Mapping[str, Tensor], vocab_size: int) -> Iterator[tuple[Any, Any]]:
    """Yield a Megatron model with the weights `tensors`, and the model's device. Process groups end with the block."""
    # Imports Megatron, which imports any package that is called apex: only after check_hardware.
    from megatron_neobert.model.neobert import NeoBERTModel
    from megatron_neobert.runtime import distributed

    device = distributed.initialize(settings)
    try:
        model = NeoBERTModel(settings, vocab_size=vocab_size).to(device)
        load_into_megatron(model, dict(tensors))
        yield model, device
    finally:
        distributed.shut_down()


@contextmanager
def exported(settings: Settings, tensors: dict[str, Tensor], vocab_size: int, layout: str) -> Iterator[Path]:
    """Write the weights `tensors` in `layout` to a temporary Hugging Face folder, and yield the folder's path."""
    with tempfile.TemporaryDirectory() as temporary:
        vocabulary, target = Path(temporary) / "vocab.txt", Path(temporary) / "model"
        words = [f"w{number}" for number in range(vocab_size - len(SPECIAL))]
        vocabulary.write_text("".join(f"{word}\n" for word in (*SPECIAL, *words)), encoding="utf-8")
        shape, longest = model_shape(settings, vocab_size=vocab_size), settings.model.max_position_embeddings
        target.mkdir()
        write_folder(target, layout, shape, load_tokenizer(vocabulary), tensors, model_max_length=longest)
        yield target
