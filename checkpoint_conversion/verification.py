"""Refuses a conversion whose result is another model than its source.

Every folder is loaded again from disk before it gets its name: its settings must be the source's, its weights the
same in every bit, and its logits on fixed prompts, padded and packed, close. In fp32 always; where bfloat16 is stored,
in bfloat16 as well, as its users will run it.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from checkpoint_conversion.comparison import (
    TOLERANCES,
    Comparison,
    LogitModel,
    build_prompts,
    compare_models,
    differing_settings,
    differing_weights,
    dtype_name,
)
from checkpoint_conversion.mapping import without_padding
from checkpoint_conversion.megatron_reader import MegatronCheckpoint
from megatron_neobert.errors import ConversionError
from megatron_neobert.model.reference import ReferenceNeoBERT

Checks = dict[str, Comparison]  # by what was compared: "padded", "packed", "padded in bfloat16"


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
        result = load(dtype)
        prompts = build_prompts(source.vocab_size, longest=min(source.max_tokens, result.max_tokens))
        for how, comparison in compare_models(source, result, prompts).items():
            _refuse_other_function(comparison, dtype, f"{what}, {how}")
            checks[how if dtype is torch.float32 else f"{how} in {dtype_name(dtype)}"] = comparison
        if dtype is torch.float32:
            _refuse_other_content(source, result, what)
    return checks


def to_report(checks: Checks) -> dict[str, Any]:
    """For conversion_report.json."""
    return {name: check.to_report() for name, check in checks.items()}


def _refuse_other_content(source: LogitModel, result: LogitModel, what: str) -> None:
    assert source.weights is not None
    assert result.weights is not None
    if differing := differing_settings(source, result):
        raise ConversionError(f"{what}: {differing[0]}, in the source and in the result; nothing was written.")
    if weights := differing_weights(source.weights(), result.weights()):
        raise ConversionError(
            f"{what}: {len(weights)} weights are not the source's, the first of them {next(iter(weights))}; nothing "
            "was written."
        )


def _refuse_other_function(comparison: Comparison, dtype: torch.dtype, what: str) -> None:
    tolerance = TOLERANCES[dtype]
    if not comparison.within(tolerance):
        raise ConversionError(
            f"{what}: its logits differ from the source's by {comparison.relative:.3g} of the largest, more than "
            f"{tolerance:g} in {dtype_name(dtype)}; nothing was written. transformers is {version('transformers')}: "
            "try the version in constraints.txt."
        )
