"""A model with a head for one GLUE task: the encoder of a folder, and whatever head transformers gives its kind.

For our exports that is a linear layer on the first token, then tanh with dropout (neobert) or GELU without (eurobert),
then the classes. A folder that was fine-tuned on MNLI keeps all but the last layer.
"""

from pathlib import Path
from typing import Any

from transformers.modeling_layers import GenericForSequenceClassification

from megatron_neobert.errors import ConversionError
from megatron_neobert.evaluation import encoders
from megatron_neobert.evaluation.encoders import LoadOptions, load_model
from megatron_neobert.evaluation.glue.tasks import GlueTask


def load_classifier(folder: Path, task: GlueTask, options: LoadOptions) -> Any:
    """The model, its new layers drawn from torch's generator.

    Raises:
        ConversionError: transformers has no head for it, or one that reads the last token.
        MissingInputError: There is no such folder.
    """
    model = load_model(
        folder,
        "AutoModelForSequenceClassification",
        options,
        num_labels=task.num_outputs,
        # Said, because a folder that was fine-tuned says something else.
        problem_type="regression" if task.is_regression else "single_label_classification",
        ignore_mismatched_sizes=True,
    )
    if isinstance(model, GenericForSequenceClassification):
        raise ConversionError(
            f"{folder}: {type(model).__name__} classifies by the last token, as causal models do, which says little of "
            "an encoder; evaluate the eurobert or neobert export of the same checkpoint."
        )
    return model


def longest_input(model: Any, tokenizer: Any, wanted: int) -> int:
    """Tokens of the longest input that model and tokenizer allow, at most `wanted`."""
    limit = encoders.longest_input(model, tokenizer)
    return wanted if limit is None else min(wanted, limit)
