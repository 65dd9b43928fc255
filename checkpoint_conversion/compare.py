"""Two models side by side: logits on fixed prompts, settings, and weights bit for bit.

`neobert convert` refuses a wrong result by it, `neobert verify` compares two folders, `neobert check parity` measures.
Logits show the function, so a wrong permutation cannot hide behind names and shapes that fit. Logits do not show
everything: prompts read a few hundred rows of the embedding, and an epsilon of 1e-6 for 1e-5 stays below any tolerance.
Therefore settings and weights are compared as well.

A conversion is verified before its folder gets its name: the result is loaded again from disk, its settings must be the
source's, its weights the same in every bit, and its logits close, padded and packed. In fp32 always; where bfloat16 is
stored, in bfloat16 as well, as its users will run it.

Models of Hugging Face folders are those that any user of transformers gets, from local files, without the folder's
code. A folder of the neobert layout is loaded with our own class, which is the file that our exports carry.

Shapes: `b` rows, `s` tokens of a row, `t` packed tokens, `v` vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForMaskedLM, EuroBertForMaskedLM, LlamaModel

from checkpoint_conversion.checkpoint import MegatronCheckpoint
from checkpoint_conversion.config_json import read_model_config
from checkpoint_conversion.mapping import HEAD_FOLDER, HEAD_NAMES, TABLES, ModelShape, to_internal, without_padding
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import LONGEST_REASON, ConversionError
from megatron_neobert.huggingface.auto_classes import loading
from megatron_neobert.huggingface.checks import WEIGHTS, check_folder
from megatron_neobert.huggingface.modeling_neobert import NeoBERTForMaskedLM
from megatron_neobert.model.reference import ReferenceNeoBERT

# Largest difference over largest logit that two correct implementations may show, by the precision that computes.
# neobert check parity measures 5e-15, 1.4e-6 and 0.026 at 28 x 768 on CPU; a wrong rotary convention shows 0.9.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}

# Settings that decide the function and the longest input; how weights started and how a vocabulary is padded do not.
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

# Options of a forward, also where config.json asks for something else.
_OUTPUTS = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
_CLASSES = {"eurobert": EuroBertForMaskedLM, "neobert": NeoBERTForMaskedLM, "llama": LlamaModel}

Checks = dict[str, "Comparison"]  # by what was compared: "padded", "packed", "padded in bfloat16"


@dataclass(frozen=True)
class LogitModel:
    """A model that can be compared, whatever kind of files it comes from."""

    description: str
    vocab_size: int
    max_tokens: int
    padded: Callable[[Tensor, Tensor], Tensor]  # (tokens_bs, attention_mask_bs) -> logits_bsv
    packed: Callable[[Tensor, Tensor], Tensor]  # (tokens_t, cu_seqlens_n) -> logits_tv
    settings: ModelConfig
    weights: Callable[[], dict[str, Tensor]]  # under internal names, without padding of the vocabulary


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
        """Return the logits of the packed row where the padded batch has them, zeros at padding."""
        logits_bsv = logits_tv.new_zeros(*self.tokens_bs.shape, logits_tv.shape[-1])
        logits_bsv[self.attention_mask_bs.bool()] = logits_tv
        return logits_bsv


@dataclass(frozen=True)
class Comparison:
    """Distance of the second model's logits from the first's, over every token that is not padding."""

    tokens: int
    largest_logit: float
    max_abs: float
    relative: float  # max_abs over largest_logit
    cosine: float  # of the token whose two logit vectors differ most in direction
    argmax_agreement: float  # share of the tokens for which both predict the same id

    def within(self, tolerance: float) -> bool:
        return self.relative <= tolerance  # False for NaN as well


def to_table(comparisons: Mapping[str, Comparison]) -> str:
    """Format one line for each comparison, under its name."""
    width = max(map(len, comparisons))
    header = f"{'':<{width}} {'tokens':>6} {'largest diff.':>13} {'relative':>9} {'cosine':>11} {'same token':>10}"
    lines = [
        f"{name:<{width}} {found.tokens:>6} {found.max_abs:>13.2e} {found.relative:>9.1e} {found.cosine:>11.8f} "
        f"{found.argmax_agreement:>10.1%}"
        for name, found in comparisons.items()
    ]
    return "\n".join([header, *lines])


def build_prompts(vocab_size: int, *, longest: int) -> Prompts:
    """Return four rows of random ids, the same in every process, none longer than `longest` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([min(tokens, longest) for tokens in PROMPT_TOKENS])
    tokens_bs = torch.randint(vocab_size, (len(lengths), int(lengths.max())), generator=generator)
    attention_mask_bs = (torch.arange(tokens_bs.shape[1]) < lengths[:, None]).long()
    return Prompts(tokens_bs * attention_mask_bs, attention_mask_bs)


# --- comparing


@torch.no_grad()
def compare_models(first: LogitModel, second: LogitModel) -> Checks:
    """Run both models on the same prompts, the second one padded and packed.

    Both are held against the first model's padded rows, so that a packed row shows what leaks between documents.
    """
    prompts = build_prompts(first.vocab_size, longest=min(first.max_tokens, second.max_tokens))
    expected_bsv = first.padded(*prompts)
    found = {"padded": second.padded(*prompts), "packed": prompts.unpack(second.packed(*prompts.packed))}
    return {how: compare_logits(expected_bsv, logits, prompts.attention_mask_bs) for how, logits in found.items()}


def compare_logits(first_bsv: Tensor, second_bsv: Tensor, attention_mask_bs: Tensor) -> Comparison:
    """Return the figures for two sets of logits, without those of padding, which mean nothing."""
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


def differing_settings(first: LogitModel, second: LogitModel) -> list[str]:
    """Describe every setting that two models do not share, with both values."""
    pairs = {name: (getattr(first.settings, name), getattr(second.settings, name)) for name in COMPARED_SETTINGS}
    return [f"{name} is {one!r} and {other!r}" for name, (one, other) in pairs.items() if one != other]


@torch.no_grad()
def differing_weights(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the tensors that are not the same in every bit, and their largest difference over their largest value.

    A tensor that only one side has, or that has another shape there, differs infinitely.
    """
    differing: dict[str, float] = {}
    for name in {**first, **second}:
        one, other = first.get(name), second.get(name)
        if one is None or other is None or one.shape != other.shape:
            differing[name] = math.inf
            continue
        one, other = one.float(), other.float()
        if not torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32)):
            largest = torch.maximum(one.abs().max(), other.abs().max())
            differing[name] = float((one - other).abs().max() / largest) if largest else 0.0  # 0 and -0
    return differing


def verify(source: LogitModel, load: Callable[[torch.dtype], LogitModel], *, stored: torch.dtype, what: str) -> Checks:
    """Compare the result of a conversion with its source, and return every comparison of logits by name.

    Args:
        source: In fp32, its weights rounded as the stored ones are.
        load: Gives the result of the conversion, computing in a given precision.
        stored: The precision of its files.
        what: The result, for messages.

    Raises:
        ConversionError: A comparison is beyond the tolerance of its precision, or settings or weights differ.
    """
    checks: Checks = {}
    for dtype in dict.fromkeys((torch.float32, stored)):
        result, name = load(dtype), str(dtype).removeprefix("torch.")
        for how, comparison in compare_models(source, result).items():
            if not comparison.within(TOLERANCES[dtype]):
                raise ConversionError(
                    f"{what}, {how}: its logits differ from the source's by {comparison.relative:.3g} of the largest, "
                    f"more than {TOLERANCES[dtype]:g} in {name}; nothing was written. transformers is "
                    f"{version('transformers')}: try the version in constraints.txt."
                )
            checks[how if dtype is torch.float32 else f"{how} in {name}"] = comparison
        if dtype is torch.float32:
            if differing := differing_settings(source, result):
                raise ConversionError(f"{what}: {differing[0]}, in the source and in the result; nothing was written.")
            if weights := differing_weights(source.weights(), result.weights()):
                raise ConversionError(
                    f"{what}: {len(weights)} weights are not the source's, the first of them {next(iter(weights))}; "
                    "nothing was written."
                )
    return checks


# --- the models


@torch.no_grad()
def make_loud(model: ReferenceNeoBERT, *, seed: int = 0) -> ReferenceNeoBERT:
    """Give the model random weights under which every part of it matters, and return it.

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


def checkpoint_model(
    checkpoint: MegatronCheckpoint, dtype: torch.dtype = torch.float32, *, description: str = "reference"
) -> LogitModel:
    """Return a checkpoint as one side of a comparison, its weights rounded to `dtype` first."""
    reference, settings = checkpoint.build_reference(dtype), checkpoint.settings.model

    def weights() -> dict[str, Tensor]:
        stripped = without_padding(checkpoint.tensors, checkpoint.shape)
        return {name: tensor.to(dtype) for name, tensor in stripped.items()}

    return LogitModel(
        description=description,
        vocab_size=checkpoint.tokenizer.vocab_size,
        max_tokens=settings.max_position_embeddings,
        padded=reference,
        packed=reference.forward_packed,
        settings=settings,
        weights=weights,
    )


def load_model(
    folder: Path,
    kind: Any,
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> Any:
    """Return what transformers makes of a folder, in evaluation mode.

    Args:
        kind: A class of transformers, or ours. AutoModel leaves out the weights of a head.
        weights: Replace those in the folder's files, under the names of the class.
        changes: Settings of config.json to replace.

    Raises:
        ConversionError: The folder names something outside it, or transformers cannot load it, or leaves out or
            invents a weight.
    """
    check_folder(folder)
    source: Path | None = folder
    options: dict[str, Any] = {"local_files_only": True, **_OUTPUTS, **changes}
    with loading(folder, kind.__name__):
        if weights is not None:
            config = kind.config_class.from_pretrained(folder, trust_remote_code=False, **options)
            source, options = None, {"config": config, "state_dict": dict(weights)}
        model, info = kind.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **options
        )
    ignored = "unexpected_keys" if kind is AutoModel else ""
    problems = {what: sorted(map(str, names)) for what, names in info.items() if names and what != ignored}
    if problems:
        found = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items())[:LONGEST_REASON]
        raise ConversionError(f"{folder}: weights and architecture do not fit ({found}); fetch the folder again.")
    return model.eval()


def load_logit_model(folder: Path, dtype: torch.dtype = torch.float32) -> LogitModel:
    """Return the model that transformers loads from a folder's files, with the head beside it in a llama folder.

    Raises:
        ConversionError: As `load_model`.
    """
    head_file = folder / HEAD_FOLDER / WEIGHTS
    head = load_file(head_file) if head_file.is_file() else {}
    return to_logit_model(folder, load_model(folder, AutoModel if head else AutoModelForMaskedLM, dtype), head)


def build_logit_model(folder: Path, layout: str, weights: Mapping[str, Tensor]) -> LogitModel:
    """Return the model that transformers makes of a folder's config.json and of weights read from it, in fp32.

    From the folder's files transformers would draw a bias that is left out.

    Args:
        layout: A name in mapping.TABLES.
        weights: Tensors under all published names of the layout.

    Raises:
        ConversionError: As `load_model`.
    """
    tensors = dict(weights)
    changes: dict[str, Any] = {"tie_word_embeddings": False} | ({"mlp_bias": True} if layout == "eurobert" else {})
    changes["vocab_size"] = len(tensors[TABLES[layout][0].published[0]])  # of the embedding, without padding
    head = {name: tensors.pop(name) for name in HEAD_NAMES} if layout == "llama" else {}
    return to_logit_model(folder, load_model(folder, _CLASSES[layout], weights=tensors, **changes), head)


def to_logit_model(folder: Path, model: Any, head: Mapping[str, Tensor]) -> LogitModel:
    """Wrap a model of transformers; `head` holds the decoder that its class has no place for."""
    config, parsed = model.config, read_model_config(check_folder(folder), folder / "config.json")
    decoder = {name: head[name].to(model.dtype) for name in HEAD_NAMES if head}

    def logits(**inputs: Any) -> Tensor:
        output = model(**inputs)
        return F.linear(output.last_hidden_state, *decoder.values()) if decoder else output.logits

    def packed_by_blocks(tokens_t: Tensor, cu_seqlens_n: Tensor) -> Tensor:  # eurobert, llama
        lengths = cu_seqlens_n.diff()
        document_t = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions_t = torch.arange(len(tokens_t)) - cu_seqlens_n[document_t]
        mask_tt = document_t[:, None] == document_t[None, :]
        return logits(input_ids=tokens_t[None], attention_mask=mask_tt[None, None], position_ids=positions_t[None])[0]

    def packed_by_lengths(tokens_t: Tensor, cu_seqlens_n: Tensor) -> Tensor:
        longest = int(cu_seqlens_n.diff().max())
        return logits(input_ids=tokens_t[None], cu_seqlens=cu_seqlens_n, max_seqlen=longest)[0]

    def weights() -> dict[str, Tensor]:
        shape = ModelShape(parsed.model, config.vocab_size, config.vocab_size)
        return to_internal(model.state_dict() | decoder, shape, TABLES[parsed.layout])

    return LogitModel(
        description=f"{folder} ({type(model).__name__})",
        vocab_size=config.vocab_size,
        max_tokens=config.max_position_embeddings,
        padded=lambda tokens_bs, mask_bs: logits(input_ids=tokens_bs, attention_mask=mask_bs),
        packed=packed_by_lengths if parsed.layout == "neobert" else packed_by_blocks,
        settings=parsed.model,
        weights=weights,
    )
