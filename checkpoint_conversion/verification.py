"""Refuses a conversion whose result computes something else than its source.

Every folder is loaded again from disk and run on fixed prompts, padded and packed, before it gets its name. In fp32
always; where bfloat16 is stored, in bfloat16 as well, as its users will run it.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from checkpoint_conversion.comparison import (
    TOLERANCES,
    Comparison,
    LogitModel,
    build_prompts,
    compare_models,
    dtype_name,
)
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


def verify(source: LogitModel, load: Callable[[torch.dtype], LogitModel], *, stored: torch.dtype, what: str) -> Checks:
    """Compares what `load` gives with the source.

    Args:
        source: In fp32, its weights rounded as the stored ones are.
        load: The result of the conversion, computing in a given precision.
        stored: The precision of its files.
        what: The result, for messages.

    Returns:
        Every comparison by name.

    Raises:
        ConversionError: One of them is beyond the tolerance of its precision.
    """
    checks: Checks = {}
    for dtype in dict.fromkeys((torch.float32, stored)):
        result = load(dtype)
        prompts = build_prompts(source.vocab_size, longest=min(source.max_tokens, result.max_tokens))
        for how, comparison in compare_models(source, result, prompts).items():
            _refuse_other_function(comparison, dtype, f"{what}, {how}")
            checks[how if dtype is torch.float32 else f"{how} in {dtype_name(dtype)}"] = comparison
    return checks


def to_report(checks: Checks) -> dict[str, Any]:
    """For conversion_report.json."""
    return {name: check.to_report() for name, check in checks.items()}


def _refuse_other_function(comparison: Comparison, dtype: torch.dtype, what: str) -> None:
    tolerance = TOLERANCES[dtype]
    if not comparison.within(tolerance):
        raise ConversionError(
            f"{what}: its logits differ from the source's by {comparison.relative:.3g} of the largest, more than "
            f"{tolerance:g} in {dtype_name(dtype)}; nothing was written. transformers is {transformers.__version__}: "
            "try the version in constraints.txt."
        )
