"""Two models side by side: logits on fixed prompts, settings, and weights bit for bit.

`neobert convert` uses it to refuse a wrong export, `neobert verify` to compare two folders, `neobert check parity` to
measure.
Logits show the function, so a wrong permutation cannot hide behind names and shapes that fit. They do not show all of
it: prompts read a few hundred rows of the embedding, and an epsilon of 1e-6 for 1e-5 stays below any tolerance.
Therefore settings and weights are compared as well.

A conversion is verified before its folder gets its name: it is loaded again from disk, its settings must be the
source's, its weights the same in every bit, and its logits close, padded and packed. In fp32 always; where bfloat16 is
stored, in bfloat16 as well, as its users will run it.

Shapes: `b` rows, `s` tokens of a row, `v` vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from checkpoint_conversion.mapping import without_padding
from checkpoint_conversion.megatron_io import MegatronCheckpoint
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import ConversionError
from megatron_neobert.model.reference import ReferenceNeoBERT

# Largest difference over largest logit that two correct implementations may show, by the precision that computes.
# neobert check parity measures 5e-15, 1.4e-6 and 0.026 at 28 x 768 on CPU; a wrong rotary convention shows 0.9.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}

# What decides the function and the longest input; how weights started and how a vocabulary is padded do not.
COMPARED_SETTINGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_width",
    "max_position_embeddings",
    "rotary_base",
    "norm_epsilon",
)

PROMPT_TOKENS = (7, 23, 64, 128)  # tokens of the four rows; all but the longest are padded

Checks = dict[str, "Comparison"]  # by what was compared: "padded", "packed", "padded in bfloat16"
PaddedFunction = Callable[[Tensor, Tensor], Tensor]  # (tokens_bs, attention_mask_bs) -> logits_bsv
PackedFunction = Callable[[Tensor, Tensor], Tensor]  # (tokens_t, cu_seqlens_n) -> logits_tv


@dataclass(frozen=True)
class LogitModel:
    """What two models have in common that can be compared, from any kind of files."""

    description: str
    vocab_size: int
    max_tokens: int
    padded: PaddedFunction
    packed: PackedFunction | None  # None: the model knows no rows of several documents
    # None: the folder has no layout that mapping.py knows.
    settings: ModelConfig | None = None
    weights: Callable[[], dict[str, Tensor]] | None = None  # under internal names, without padding of the vocabulary


class Prompts(NamedTuple):
    """A padded batch: token ids, and 1 where there is a token."""

    tokens_bs: Tensor
    attention_mask_bs: Tensor

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        """The rows end to end: token ids, and where each starts, with their number at the end."""
        present = self.attention_mask_bs.bool()
        return self.tokens_bs[present], F.pad(present.sum(1).cumsum(0), (1, 0)).int()

    def unpack(self, logits_tv: Tensor) -> Tensor:
        """Logits of the packed row where the padded batch has them, zeros at padding."""
        logits_bsv = logits_tv.new_zeros(*self.tokens_bs.shape, logits_tv.shape[-1])
        logits_bsv[self.attention_mask_bs.bool()] = logits_tv
        return logits_bsv


@dataclass(frozen=True)
class Comparison:
    """How far the second model's logits are from the first's, over every token that is not padding."""

    tokens: int
    largest_logit: float
    max_abs: float
    relative: float  # max_abs over largest_logit
    cosine: float  # of the token whose two logit vectors differ most in direction
    argmax_agreement: float  # share of the tokens for which both predict the same id

    def within(self, tolerance: float) -> bool:
        return self.relative <= tolerance  # False for NaN as well


def to_table(comparisons: Mapping[str, Comparison]) -> str:
    """One line for each, under its name."""
    width = max(map(len, comparisons))
    header = f"{'':<{width}} {'tokens':>6} {'largest diff.':>13} {'relative':>9} {'cosine':>11} {'same token':>10}"
    lines = [
        f"{name:<{width}} {found.tokens:>6} {found.max_abs:>13.2e} {found.relative:>9.1e} {found.cosine:>11.8f} "
        f"{found.argmax_agreement:>10.1%}"
        for name, found in comparisons.items()
    ]
    return "\n".join([header, *lines])


def dtype_name(dtype: torch.dtype) -> str:
    """As files and flags spell it: float32."""
    return str(dtype).removeprefix("torch.")


def build_prompts(vocab_size: int, *, longest: int) -> Prompts:
    """Four rows of random ids, the same in every process, none longer than `longest` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([min(tokens, longest) for tokens in PROMPT_TOKENS])
    tokens_bs = torch.randint(vocab_size, (len(lengths), int(lengths.max())), generator=generator)
    attention_mask_bs = (torch.arange(tokens_bs.shape[1]) < lengths[:, None]).long()
    return Prompts(tokens_bs * attention_mask_bs, attention_mask_bs)


@torch.no_grad()
def compare_models(first: LogitModel, second: LogitModel, prompts: Prompts) -> dict[str, Comparison]:
    """Runs both on the same prompts: `padded`, and `packed` where the second knows packed rows.

    Both are held against the first model's padded rows, so that a packed row shows what leaks between documents.
    """
    expected_bsv = first.padded(*prompts)
    found = {"padded": second.padded(*prompts)}
    if second.packed is not None:
        found["packed"] = prompts.unpack(second.packed(*prompts.packed))
    return {how: compare_logits(expected_bsv, logits, prompts.attention_mask_bs) for how, logits in found.items()}


def differing_settings(first: LogitModel, second: LogitModel) -> list[str]:
    """Every setting that two models do not share, with both values."""
    pairs = {name: (getattr(first.settings, name), getattr(second.settings, name)) for name in COMPARED_SETTINGS}
    return [f"{name} is {one!r} and {other!r}" for name, (one, other) in pairs.items() if one != other]


@torch.no_grad()
def differing_weights(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float]:
    """The tensors that are not the same in every bit, and their largest difference over their largest value."""
    differing = {}
    for name, tensor in first.items():
        one, other = tensor.float(), second[name].float()
        if not torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32)):
            largest = torch.maximum(one.abs().max(), other.abs().max())
            differing[name] = float((one - other).abs().max() / largest) if largest else 0.0  # 0 and -0
    return differing


@torch.no_grad()
def make_loud(model: ReferenceNeoBERT, *, seed: int = 0) -> ReferenceNeoBERT:
    """Gives the model random weights under which every part of it matters, and returns it.

    Fresh weights are a poor test: logits of 0.05 hide errors, attention is almost uniform under any rotary
    convention, and norms of one and biases of zero do nothing. With these, logits reach several units.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name == "model.encoder.weight":
            parameter.normal_(std=0.1, generator=generator)  # small enough for the norm's epsilon to matter
        elif parameter.dim() == 1:
            parameter.normal_(std=0.5, generator=generator)
        else:
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)  # keeps the variance of its input
    return model.eval()


def compare_logits(first_bsv: Tensor, second_bsv: Tensor, attention_mask_bs: Tensor) -> Comparison:
    """The figures for two sets of logits; padding is left out, its logits mean nothing."""
    present = attention_mask_bs.bool()
    first, second = first_bsv[present].double(), second_bsv[present].double()
    max_abs, largest = (first - second).abs().max(), first.abs().max()
    return Comparison(
        tokens=len(first),
        largest_logit=float(largest),
        max_abs=float(max_abs),
        relative=float(max_abs / largest),
        cosine=float(F.cosine_similarity(first, second, dim=-1).min()),
        argmax_agreement=float((first.argmax(-1) == second.argmax(-1)).double().mean()),
    )


def reference_model(reference: ReferenceNeoBERT, *, max_tokens: int, description: str = "reference") -> LogitModel:
    """The plain PyTorch model as one side of a comparison."""
    return LogitModel(
        description=description,
        vocab_size=reference.decoder.out_features,
        max_tokens=max_tokens,
        padded=reference,
        packed=reference.forward_packed,
    )


def checkpoint_model(
    checkpoint: MegatronCheckpoint, dtype: torch.dtype = torch.float32, *, description: str = "reference"
) -> LogitModel:
    """A checkpoint as one side of a comparison, its weights rounded to `dtype` first."""
    settings = checkpoint.settings.model
    plain = reference_model(
        checkpoint.build_reference(dtype), max_tokens=settings.max_position_embeddings, description=description
    )

    def weights() -> dict[str, Tensor]:
        stripped = without_padding(checkpoint.tensors, checkpoint.shape)
        return {name: tensor.to(dtype) for name, tensor in stripped.items()}

    return replace(plain, settings=settings, weights=weights)


def verify(source: LogitModel, load: Callable[[torch.dtype], LogitModel], *, stored: torch.dtype, what: str) -> Checks:
    """Compares what `load` gives with the source.

    Args:
        source: In fp32, its weights rounded as the stored ones are.
        load: The result of the conversion, computing in a given precision.
        stored: The precision of its files.
        what: The result, for messages.

    Returns:
        Every comparison of logits by name.

    Raises:
        ConversionError: One of them is beyond the tolerance of its precision, or settings or weights differ.
    """
    checks: Checks = {}
    for dtype in dict.fromkeys((torch.float32, stored)):
        result, tolerance = load(dtype), TOLERANCES[dtype]
        prompts = build_prompts(source.vocab_size, longest=min(source.max_tokens, result.max_tokens))
        for how, comparison in compare_models(source, result, prompts).items():
            if not comparison.within(tolerance):
                raise ConversionError(
                    f"{what}, {how}: its logits differ from the source's by {comparison.relative:.3g} of the largest, "
                    f"more than {tolerance:g} in {dtype_name(dtype)}; nothing was written. transformers is "
                    f"{version('transformers')}: try the version in constraints.txt."
                )
            checks[how if dtype is torch.float32 else f"{how} in {dtype_name(dtype)}"] = comparison
        if dtype is torch.float32:
            assert source.weights is not None
            assert result.weights is not None
            if differing := differing_settings(source, result):
                raise ConversionError(f"{what}: {differing[0]}, in the source and in the result; nothing was written.")
            if weights := differing_weights(source.weights(), result.weights()):
                raise ConversionError(
                    f"{what}: {len(weights)} weights are not the source's, the first of them {next(iter(weights))}; "
                    "nothing was written."
                )
    return checks
