"""README.md of an exported folder: the model card that the Hub shows.

Front matter and text (model_card_template.md) follow from the files of the folder (config.json, conversion_report.json,
the headers of the weights), from the records of evaluations, and from what only the user knows: licence, data,
language. Written anew, by a conversion or by `neobert model-card`, the card keeps what the user declared or added to
its front matter before, and the text below its last line.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open

from megatron_neobert.cli import option
from megatron_neobert.errors import ConversionError, DataError, MissingInputError, OutputError, short_reason
from megatron_neobert.huggingface.checks import MODELING_FILE, check_folder, read_object
from megatron_neobert.runtime.atomic_files import read_text, replace_file, require_folder

CARD = "README.md"
REPORT = "conversion_report.json"
MARKER = "<!-- Text below this line stays when the card is written anew. -->"
NO_MODEL_ID = "path/to/this/folder"  # stands in the examples until the model's name on the Hub is known

_TEMPLATE = Path(__file__).with_name("model_card_template.md")
_MODEL_ID = re.compile(r'^model_id = "(.+)"$', flags=re.MULTILINE)  # as the examples of a card have it


def read_names(given: Any) -> Any:
    """Return a name on the Hub, or a tuple of several, as a command line gives it; ValueError if one cannot exist."""
    try:
        for name in [given] if isinstance(given, str) else given:
            validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError("cannot be a name on the Hub; expected owner/name.") from error
    return given if isinstance(given, str) else tuple(given)


def read_codes(given: Any) -> Any:
    """Return a licence's identifier, or a tuple of languages; ValueError if the Hub can know none of this form."""
    if isinstance(given, str):
        if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", given):
            raise ValueError("cannot be a licence's identifier on the Hub; expected one like apache-2.0.")
        return given
    if not all(re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual|code", code) for code in given):
        raise ValueError("cannot be codes of languages; expected ISO 639, such as en.")
    return tuple(given)


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """The command line of `neobert model-card`: facts that only the owner of a model has."""

    model: Path = option(help="folder of a converted model", metavar="DIR")
    name: str | None = option(
        None, "of the model on the Hub, for the card's examples", metavar="OWNER/NAME", read=read_names
    )
    license: str | None = option(
        None, "the Hub's identifier, such as apache-2.0 (at first: unknown)", metavar="ID", read=read_codes
    )
    base_model: str | None = option(
        None, "model on the Hub whose weights training started from", metavar="OWNER/NAME", read=read_names
    )
    dataset: tuple[str, ...] = option((), "training data on the Hub", metavar="OWNER/NAME", read=read_names)
    language: tuple[str, ...] = option((), "ISO 639 codes, such as en", metavar="CODE", read=read_codes)
    results: tuple[Path, ...] = option(
        (), "--output of evaluations of this model: scores of GLUE and named-entity recognition", metavar="DIR"
    )


def rewrite_model_card(options: CardOptions) -> None:
    """Write the model card of a converted model anew, with what only its owner knows.

    A flag that is left out keeps what the card has already, and so does the text below the card's last line.
    """
    for flag, folders in {"--model": (options.model,), "--results": options.results}.items():
        for folder in folders:
            require_folder(flag, folder)
    write_model_card(options, read_results(options.results, options.model) if options.results else ())
    print(f"wrote {options.model / CARD}")


def write_model_card(options: CardOptions, results: Sequence[EvalResult] = ()) -> None:
    """Write the card, or replace it at once; what is not given stays as the present card has it.

    Args:
        results: Added to the results of the present card; a new value of the same metric replaces the old one.

    Raises:
        MissingInputError, ConversionError, DataError: The folder holds no model of ours, or a card that is no card.
        OutputError: The card was not written by this function, and would be lost.
    """
    folder = options.model
    present = _read_card(folder / CARD)
    found = _MODEL_ID.search(present.text)
    model_id = options.name or (found.group(1) if found else NO_MODEL_ID)
    title = "NeoBERT" if model_id == NO_MODEL_ID else model_id.rsplit("/", maxsplit=1)[-1]
    try:
        facts = read_facts(folder)
        data = cast(ModelCardData, present.data)
        data.license = options.license or data.license or "unknown"
        data.base_model = options.base_model or data.base_model
        data.datasets = list(options.dataset) or data.datasets
        data.language = list(options.language) or data.language
        if results:
            kept = [old for old in data.eval_results or () if not any(map(old.is_equal_except_value, results))]
            data.eval_results = [*kept, *results]
        data.model_name = title if data.eval_results else None  # part of the results, or a field of its own
        pooled = ["sentence-transformers", "feature-extraction"] if facts["sentence_transformers"] else []
        data.tags = list(dict.fromkeys(["neobert", "encoder", *pooled, *(data.tags or [])]))
        # Not an embedding model where an export has just got its pooling: fine-tuning starts from such vectors.
        is_embedder = pooled and not facts["has_head"] and not facts["has_report"]
        task = "fill-mask" if facts["has_head"] else "feature-extraction"
        data.pipeline_tag = "sentence-similarity" if is_embedder else task
        data.library_name = "sentence-transformers" if is_embedder else "transformers"
        below = present.text.partition(MARKER)[2] or "\n"
        card = ModelCard.from_template(
            data, template_path=str(_TEMPLATE), title=title, model_id=model_id, marker=MARKER, kept=below, **facts
        )
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        raise ConversionError(
            f"{folder}: config.json, {REPORT} or the front matter of {CARD} holds what a conversion does not write "
            f"({short_reason(error)}); convert the model again."
        ) from error
    replace_file(folder / CARD, str(card))


def read_results(records: Sequence[Path], model: Path) -> list[EvalResult]:
    """Return the model's scores in GLUE and named-entity recognition, in the form of the Hub's model index.

    Args:
        records: Folders that evaluations wrote to.

    Raises:
        MissingInputError: The folders hold no scores of this model.
        DataError: A record cannot be read.
    """
    from megatron_neobert.evaluation.models import fingerprint  # torch: seconds
    from megatron_neobert.evaluation.report import find_records

    kinds = {"glue": "text-classification", "ner": "token-classification"}
    own = fingerprint(model)
    runs = [run for run in find_records(records) if run.kind in kinds and run.model.fingerprint == own]
    if not runs:
        raise MissingInputError(
            f"--results {' '.join(map(str, records))}: no record of GLUE or named-entity recognition is of {model} "
            f"(fingerprint {own}); evaluate this folder."
        )
    try:
        return [
            EvalResult(
                task_type=kinds[run.kind],
                dataset_type="nyu-mll/glue" if run.kind == "glue" else task,
                dataset_name=f"GLUE {task}" if run.kind == "glue" else task,
                dataset_config=task if run.kind == "glue" else None,
                metric_type=metric,
                metric_value=value["mean"],
            )
            for run in runs
            for task, result in run.results["tasks"].items()
            for metric, value in result["metrics"].items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        paths = ", ".join(str(run.path) for run in runs)
        raise DataError(f"{paths}: results are not of this version ({short_reason(error)}); measure again.") from error


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what the files of a folder hold of its model, by the names that the template has for it."""
    config = check_folder(folder)
    layout = config.get("model_type")
    if layout not in ("eurobert", "neobert", "llama") or (layout == "llama" and config.get("is_causal") is not False):
        raise ConversionError(
            f"{folder / 'config.json'}: model_type is {layout!r:.80}; a card is written for eurobert, neobert, llama "
            "(with is_causal false), as neobert convert writes them."
        )
    if layout == "neobert" and not (folder / MODELING_FILE).is_file():
        raise ConversionError(f"{folder} has no {MODELING_FILE}, of which its card would speak; convert it first.")
    tokenizer = read_object(folder / "tokenizer_config.json")
    mask_token = tokenizer.get("mask_token")
    if not isinstance(mask_token, str):
        raise ConversionError(f"{folder / 'tokenizer_config.json'}: names no mask_token; convert the model again.")
    report = read_object(folder / REPORT) if (folder / REPORT).exists() else {}
    run = report.get("training") or {}
    versions = report.get("versions") or {}
    return {
        "layout": layout,
        "config": config,
        "parameters": count_parameters(folder),
        "masked_text": json.dumps(f"Paris is the {mask_token} of France.", ensure_ascii=False),
        "lowercase": tokenizer.get("do_lower_case") is True,
        # In the class that config.json names; the head of a llama folder is beside it.
        "has_head": any(str(name).endswith(("ForMaskedLM", "LMHead")) for name in config.get("architectures") or ()),
        "sentence_transformers": (folder / "modules.json").is_file(),
        "has_report": bool(report),
        **{name: report.get(name) or {} for name in ("source", "compared", "verification")},
        "versions": {name: versions[name] for name in ("torch", "transformers") if name in versions},
        **{name: run.get(name) or {} for name in ("data", "training", "optimizer")},
    }


def count_parameters(folder: Path) -> int:
    """Return the number of parameters without a head beside the model; reads headers, not weights."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ConversionError(f"{path}: not a safetensors file ({error}); fetch it again.") from error
    if not total:
        raise MissingInputError(f"{folder} holds no *.safetensors; name the folder of a converted model.")
    return total


def _read_card(path: Path) -> ModelCard:
    """Return the present card, or an empty one.

    Raises:
        OutputError: The card lacks the line below which text is kept.
        DataError: Its front matter cannot be read.
    """
    if not path.exists():
        return ModelCard("---\n{}\n---\n")
    try:
        content = read_text(path)
        card = ModelCard(content) if MARKER in content else None
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: its front matter cannot be read ({reason:.200}); fix or remove the file.") from error
    if card is None:
        raise OutputError(
            f"{path} exists already and was written by somebody else; add the line {MARKER} above the text that "
            "shall stay, or remove the file."
        )
    return card
