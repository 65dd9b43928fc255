"""Compare two models: logits on fixed prompts, settings, and weights bit for bit.

`neobert convert`, `neobert verify` and `neobert check parity` use this module. Equal logits show that the function is
equal; names and shapes would not reveal a wrong permutation. Logits do not show all errors: the prompts use only a few
hundred rows of the embedding, and an epsilon of 1e-6 instead of 1e-5 changes less than any tolerance. Therefore
settings and weights are compared as well.

A conversion is verified before its folder gets its final name. The result is loaded again from disk; its settings and
weights must equal the source's, the weights bit for bit, and its logits must be close, padded and packed, in fp32. If
the stored weights are in bfloat16, logits are compared in bfloat16 too.

Hugging Face folders are loaded with transformers from local files, and none of their code is executed. For the neobert
layout, transformers uses the class of this package, which is also the modelling file of exported folders.

Shapes: `b` rows of the padded batch, `s` positions of a row, `t` packed tokens, `n` documents + 1, `v` vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import EuroBertForMaskedLM

from checkpoint_conversion.checkpoint import COMPARED_SETTINGS, MegatronCheckpoint
from checkpoint_conversion.config_json import read_model_config
from checkpoint_conversion.mapping import NEOBERT, STRIP_PADDING, TABLES, ModelShape, to_internal
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import ConversionError
from megatron_neobert.evaluation.models import load_model
from megatron_neobert.evaluation.options import ComputeOptions
from megatron_neobert.huggingface.auto_classes import loading
from megatron_neobert.huggingface.checks import check_folder
from megatron_neobert.huggingface.modeling_neobert import NeoBERTForMaskedLM
from megatron_neobert.model.reference import ReferenceNeoBERT

# Largest difference between two correct implementations, relative to the largest logit, by the dtype that computes.
# neobert check parity measures 1.4e-6 and 0.026 at 28 x 768 on CPU, and 0.9 for a wrong rotary convention.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}

PROMPT_TOKENS = (7, 23, 64, 128)  # lengths of the four prompts

_CLASSES: dict[str, Any] = {"eurobert": EuroBertForMaskedLM, "neobert": NeoBERTForMaskedLM}

# Keys name the inputs: "padded", "packed", "padded in bfloat16", "packed in bfloat16"; for ONNX, rows x tokens.
Checks = dict[str, "Comparison"]


@dataclass(frozen=True)
class LogitModel:
    """A model that can be compared, loaded from a checkpoint or from a Hugging Face folder."""

    description: str
    vocab_size: int
    padded: Callable[[Tensor, Tensor], Tensor]  # (tokens_bs, attention_mask_bs) -> logits_bsv
    packed: Callable[[Tensor, Tensor], Tensor]  # (tokens_t, cu_seqlens_n) -> logits_tv
    settings: ModelConfig
    weights: Callable[[], dict[str, Tensor]]  # by internal name, without the padding of the vocabulary


class Prompts(NamedTuple):
    """A padded batch; the mask is 1 at tokens and 0 at padding."""

    tokens_bs: Tensor
    attention_mask_bs: Tensor

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        """All prompts as one packed sequence: token ids [t], and int32 document bounds [n] from 0 to t."""
        present_bs = self.attention_mask_bs.bool()
        return self.tokens_bs[present_bs], F.pad(present_bs.sum(1).cumsum(0), (1, 0)).int()

    def unpack(self, logits_tv: Tensor) -> Tensor:
        """Move the packed sequence's logits to the padded batch. Return [b, s, v], with zeros at padding."""
        logits_bsv = logits_tv.new_zeros(*self.tokens_bs.shape, logits_tv.shape[-1])
        logits_bsv[self.attention_mask_bs.bool()] = logits_tv
        return logits_bsv


@dataclass(frozen=True)
class Comparison:
    """Difference between the logits of two models over all tokens except padding."""

    tokens: int
    max_abs: float  # largest absolute difference
    relative: float  # max_abs / largest absolute logit of the first model
    argmax_agreement: float  # share of tokens for which both models predict the same id

    def within(self, tolerance: float) -> bool:
        """Return True if the relative difference is at most `tolerance`; False for NaN."""
        return self.relative <= tolerance


def to_table(comparisons: Mapping[str, Comparison]) -> str:
    """Return a text table: a header and one line per comparison. There must be at least one comparison."""
    width = max(map(len, comparisons))
    header = f"{'':<{width}} {'tokens':>6} {'difference':>13} {'relative':>9} {'same prediction':>15}"
    lines = [
        f"{name:<{width}} {check.tokens:>6} {check.max_abs:>13.2e} {check.relative:>9.1e} "
        f"{check.argmax_agreement:>15.1%}"
        for name, check in comparisons.items()
    ]
    return "\n".join([header, *lines])


def build_prompts(vocab_size: int, *, longest: int, lengths: Sequence[int] = ()) -> Prompts:
    """Return random prompts of `lengths` tokens (default: PROMPT_TOKENS), cut at `longest`. The seed is fixed."""
    generator = torch.Generator().manual_seed(0)
    lengths_b = torch.tensor(lengths or PROMPT_TOKENS).clamp(max=longest)
    tokens_bs = torch.randint(vocab_size, (len(lengths_b), int(lengths_b.max())), generator=generator)
    attention_mask_bs = (torch.arange(tokens_bs.shape[1]) < lengths_b[:, None]).long()
    return Prompts(tokens_bs * attention_mask_bs, attention_mask_bs)


# --- comparing


@torch.no_grad()
def compare_models(first: LogitModel, second: LogitModel) -> Checks:
    """Compare the second model's logits with the first model's padded logits. Return {"padded": ..., "packed": ...}.

    Both models run on the same fixed prompts, and must have vocabularies of the same size.
    """
    longest = min(model.settings.max_position_embeddings for model in (first, second))
    prompts = build_prompts(first.vocab_size, longest=longest)
    expected_bsv = first.padded(*prompts)
    logits_bsv = {"padded": second.padded(*prompts), "packed": prompts.unpack(second.packed(*prompts.packed))}
    return {how: compare_logits(expected_bsv, logits, prompts.attention_mask_bs) for how, logits in logits_bsv.items()}


def compare_logits(first_bsv: Tensor, second_bsv: Tensor, attention_mask_bs: Tensor) -> Comparison:
    """Return how the second logits differ from the first. Tokens with mask 0 are padding and are not compared."""
    present = attention_mask_bs.bool()
    first, second = first_bsv[present].double(), second_bsv[present].double()
    max_abs, largest = (first - second).abs().max(), first.abs().max()
    return Comparison(
        tokens=len(first),
        max_abs=float(max_abs),
        relative=float(max_abs / largest),
        argmax_agreement=float((first.argmax(-1) == second.argmax(-1)).double().mean()),
    )


def differing_settings(first: LogitModel, second: LogitModel) -> list[str]:
    """Return a description, with both values, of each setting in COMPARED_SETTINGS that differs."""
    values = {name: (getattr(first.settings, name), getattr(second.settings, name)) for name in COMPARED_SETTINGS}
    return [f"{name} is {a!r} and {b!r}" for name, (a, b) in values.items() if a != b]


@torch.no_grad()
def differing_weights(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float]:
    """Return {name: largest difference} for all tensors that are not equal bit for bit in fp32.

    Each difference is relative to the largest absolute value in the two tensors. The difference is infinite if one
    tensor is missing or the two shapes differ.
    """
    differing: dict[str, float] = {}
    for name in {**first, **second}:
        if name not in first or name not in second or first[name].shape != second[name].shape:
            differing[name] = math.inf
            continue
        a, b = first[name].float(), second[name].float()
        if not torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)):
            largest = torch.maximum(a.abs().max(), b.abs().max())
            differing[name] = float((a - b).abs().max() / largest) if largest else 0.0  # 0 and -0
    return differing


def verify(source: LogitModel, load: Callable[[torch.dtype], LogitModel], *, stored: torch.dtype, name: str) -> Checks:
    """Compare a converted model's logits, settings and weights with its source. Return the comparisons of logits.

    Args:
        source: Model that computes in fp32. Its weights are already rounded to `stored`.
        load: Loads the converted model in a dtype. `verify` calls it with float32, and with `stored` if that differs.
        stored: Dtype of the weights in the converted model's files.
        name: Name of the converted model for messages.

    Raises:
        ConversionError: Logits differ by more than the tolerance of their dtype, or settings or weights differ.
    """
    checks: Checks = {}
    for dtype in dict.fromkeys((torch.float32, stored)):
        result, precision, differences = load(dtype), str(dtype).removeprefix("torch."), list[str]()
        for how, comparison in compare_models(source, result).items():
            if not comparison.within(TOLERANCES[dtype]):
                differences.append(
                    f"{how}, its logits differ by {comparison.relative:.3g} of the largest, more than "
                    f"{TOLERANCES[dtype]:g} in {precision}"
                )
            checks[how if dtype is torch.float32 else f"{how} in {precision}"] = comparison
        if dtype is torch.float32:
            differences += differing_settings(source, result)
            if weights := differing_weights(source.weights(), result.weights()):
                differences.append(f"{len(weights)} weights differ, the first is {next(iter(weights))}")
        if differences:
            raise ConversionError(
                f"{name} differs from its source: {differences[0]}; nothing was written. Replace transformers "
                f"{version('transformers')} by the version in constraints.txt."
            )
    return checks


# --- the models


@torch.no_grad()
def draw_large_weights(model: ReferenceNeoBERT) -> ReferenceNeoBERT:
    """Set random weights so large that every parameter affects the logits. Return the same model in evaluation mode.

    Initial weights hide errors: logits are about 0.05, attention is almost uniform under any rotary convention, norms
    are one and biases zero. With the new weights, logits reach several units.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name == "model.encoder.weight":
            parameter.normal_(std=0.1, generator=generator)  # so small that the norm's epsilon matters
        elif parameter.dim() == 1:
            parameter.normal_(std=0.5, generator=generator)
        else:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)  # keeps the input's variance
    return model.eval()


def checkpoint_model(
    checkpoint: MegatronCheckpoint, dtype: torch.dtype = torch.float32, *, description: str = "reference"
) -> LogitModel:
    """Return a checkpoint's model in plain PyTorch for comparisons in fp32, with weights rounded to `dtype`.

    `description` is the model's name in messages.
    """
    reference, settings = checkpoint.build_reference(dtype), checkpoint.settings.model

    def weights() -> dict[str, Tensor]:
        padded = {entry.internal for entry in NEOBERT if entry.rule is STRIP_PADDING}
        rows = checkpoint.tokenizer.vocab_size
        return {
            name: (tensor[:rows] if name in padded else tensor).to(dtype) for name, tensor in checkpoint.tensors.items()
        }

    return LogitModel(
        description=description,
        vocab_size=checkpoint.tokenizer.vocab_size,
        padded=reference,
        packed=reference.forward_packed,
        settings=settings,
        weights=weights,
    )


def load_logit_model(folder: Path, dtype: torch.dtype = torch.float32) -> LogitModel:
    """Load a Hugging Face folder's model for comparisons. The model computes in `dtype` on the CPU."""
    precision: Any = str(dtype).removeprefix("torch.")
    options = ComputeOptions(dtype=precision, device="cpu")
    return to_logit_model(folder, load_model(folder, "AutoModelForMaskedLM", options, return_dict=True))


def build_logit_model(folder: Path, layout: str, weights: Mapping[str, Tensor]) -> LogitModel:
    """Build the model that a folder's config.json describes, with the given weights, for a comparison in fp32.

    The folder's weights are not used, because transformers would initialize missing biases randomly.

    Args:
        layout: A name in mapping.TABLES.
        weights: Tensors under all published names of the layout, from `imports.read_weights`.
    """
    kind = _CLASSES[layout]
    changes: dict[str, Any] = {"return_dict": True, "tie_word_embeddings": False}
    changes |= {"mlp_bias": True} if layout == "eurobert" else {}
    changes["vocab_size"] = len(weights[TABLES[layout][0].published[0]])  # rows of the embedding, without padding
    with loading(folder, kind.__name__):
        config = kind.config_class.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **changes)
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        assert not any(info.values()), f"read_weights has checked the weights of {folder}: {info}"
    return to_logit_model(folder, model.eval())


def to_logit_model(folder: Path, model: Any) -> LogitModel:
    """Wrap a loaded masked language model for a comparison."""
    config, parsed = model.config, read_model_config(check_folder(folder), folder / "config.json")

    # For eurobert, whose class has no cu_seqlens.
    def packed_by_blocks(tokens_t: Tensor, cu_seqlens_n: Tensor) -> Tensor:
        lengths = cu_seqlens_n.diff()
        document_t = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions_t = torch.arange(len(tokens_t)) - cu_seqlens_n[document_t]
        mask_tt = document_t[:, None] == document_t[None, :]
        inputs = {"attention_mask": mask_tt[None, None], "position_ids": positions_t[None]}
        return model(input_ids=tokens_t[None], **inputs).logits[0]

    def packed_by_lengths(tokens_t: Tensor, cu_seqlens_n: Tensor) -> Tensor:
        longest = int(cu_seqlens_n.diff().max())
        return model(input_ids=tokens_t[None], cu_seqlens=cu_seqlens_n, max_seqlen=longest).logits[0]

    def weights() -> dict[str, Tensor]:
        shape = ModelShape(parsed.model, config.vocab_size, config.vocab_size)
        return to_internal(model.state_dict(), shape, TABLES[parsed.layout])

    return LogitModel(
        description=f"{folder} ({type(model).__name__})",
        vocab_size=config.vocab_size,
        padded=lambda tokens_bs, mask_bs: model(input_ids=tokens_bs, attention_mask=mask_bs).logits,
        packed=packed_by_lengths if parsed.layout == "neobert" else packed_by_blocks,
        settings=parsed.model,
        weights=weights,
    )
