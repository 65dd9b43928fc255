"""Writes the model card of a converted model anew, with what only its owner knows.

    neobert model-card --model DIR --license apache-2.0 --language en --dataset tiiuae/falcon-refinedweb

replaces DIR/README.md. A flag that is left out keeps what the card has already, and so does the text below the card's
last line.
"""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_neobert.errors import CommandParser, DataError, MissingInputError
from megatron_neobert.runtime.atomic_files import read_text, require_folder

if TYPE_CHECKING:  # --help answers without importing it
    from huggingface_hub import EvalResult


def main() -> None:
    arguments = parse_arguments()
    require_folder("--model", arguments.model)
    from checkpoint_conversion.model_card import CARD, write_model_card

    write_model_card(
        arguments.model,
        model_id=arguments.name,
        license=arguments.license,
        base_model=arguments.base_model,
        datasets=arguments.dataset,
        language=arguments.language,
        evaluations=read_evaluations(arguments.evaluations) if arguments.evaluations else (),
    )
    print(f"wrote {arguments.model / CARD}")


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="folder of a converted model")
    add("--name", metavar="OWNER/NAME", help="of the model on the Hub, for the card's examples")
    add("--license", metavar="ID", help="the Hub's identifier, such as apache-2.0 (at first: unknown)")
    add("--base-model", metavar="OWNER/NAME", help="model on the Hub whose weights training started from")
    add("--dataset", nargs="+", default=(), metavar="OWNER/NAME", help="training data on the Hub")
    add("--language", nargs="+", default=(), metavar="CODE", help="ISO 639 codes, such as en")
    fields = "task_type, dataset_type, dataset_name, metric_type, metric_value"
    results = f"JSON list of results, each with {fields} and, if wanted, other fields of huggingface_hub's EvalResult"
    add("--evaluations", type=Path, metavar="FILE", help=results)
    return parser.parse_args()


def read_evaluations(path: Path) -> "list[EvalResult]":
    """The results that a file lists.

    Raises:
        MissingInputError: No such file.
        DataError: It is not a list of results, or one of them is incomplete, or has another field or no finite value.
    """
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise MissingInputError(f"--evaluations {path}: no such file.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"--evaluations {path}: not JSON ({error}).") from error
    if not isinstance(content, list) or not content:
        raise DataError(f"--evaluations {path}: expected a list of at least one result.")
    return [to_result(entry, place=f"--evaluations {path}: result {number}") for number, entry in enumerate(content)]


def to_result(entry: Any, *, place: str) -> "EvalResult":
    from huggingface_hub import EvalResult

    try:
        result = EvalResult(**entry)
    except (TypeError, ValueError) as error:  # a field is missing, unknown, or needs another
        raise DataError(f"{place}: {error}; the fields are those of huggingface_hub's EvalResult.") from error
    value = result.metric_value
    if not isinstance(value, str) and not (type(value) in (int, float) and math.isfinite(value)):
        raise DataError(f"{place} has the metric_value {value!r:.80}; expected a finite number or a text.")
    for name in ("task_type", "dataset_type", "dataset_name", "metric_type"):
        if not isinstance(text := getattr(result, name), str) or not text:
            raise DataError(f"{place} has the {name} {text!r:.80}; expected a text.")
    return result
