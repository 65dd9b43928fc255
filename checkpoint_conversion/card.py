"""Write README.md of an exported folder, the model card that the Hub shows.

The card is made from the files of the folder (config.json, conversion_report.json, the headers of the weights), from
records of evaluations, and from facts that the user declares: licence, data, language. A conversion writes the first
card, and `neobert model-card` replaces it. The new card keeps front matter that the user declared or added, and the
text below the marker line. The text of the card is in model_card_template.md.
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
# Cards in use have this line; a change of the words would lose the text below it.
MARKER = "<!-- Text below this line stays when the card is written anew. -->"
NO_MODEL_ID = "path/to/this/folder"  # in the examples until --name is given

_TEMPLATE = Path(__file__).with_name("model_card_template.md")
_MODEL_ID = re.compile(r'^model_id = "(.+)"$', flags=re.MULTILINE)  # line of the examples


def read_name(text: str) -> str:
    """Return `text` if it is a valid repository name of the Hub, else raise ValueError."""
    try:
        validate_repo_id(text)
    except HFValidationError as error:
        raise ValueError("cannot be a name on the Hub; expected owner/name.") from error
    return text


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """The command line of `neobert model-card`."""

    model: Path = option(help="folder of a converted model", metavar="DIR")
    name: str | None = option(
        None, "name of the model on the Hub, for the card's examples", metavar="OWNER/NAME", read=read_name
    )
    license: str | None = option(
        None, "licence identifier of the Hub, such as apache-2.0 (in a new card: unknown)", metavar="ID"
    )
    base_model: str | None = option(
        None, "model on the Hub whose weights training started from", metavar="OWNER/NAME", read=read_name
    )
    dataset: tuple[str, ...] = option(
        (), "training data on the Hub", metavar="OWNER/NAME", read=lambda names: tuple(map(read_name, names))
    )
    language: tuple[str, ...] = option((), "ISO 639 codes, such as en", metavar="CODE")
    results: tuple[Path, ...] = option(
        (), "--output folders of GLUE or named-entity evaluations of this model", metavar="DIR"
    )


def rewrite_model_card(options: CardOptions) -> None:
    """Write the model card of a converted model, with the facts that its owner declares.

    The new card keeps the present card's values of flags that are not given, and its text below the line `MARKER`.

    Raises:
        MissingInputError: A folder or a file of the model does not exist, or --results has no scores of this model.
        ConversionError: A file of the model is not in the form that `neobert convert` writes.
        DataError: A record of --results, or the front matter of the present card, cannot be read.
        OutputError: The present card has no line `MARKER`.
    """
    require_folder("--model", options.model)
    for folder in options.results:
        require_folder("--results", folder)
    write_model_card(options, read_results(options.results, options.model) if options.results else ())
    print(f"wrote {options.model / CARD}")


def write_model_card(options: CardOptions, results: Sequence[EvalResult] = ()) -> None:
    """Write README.md of `options.model`, or replace it. Keep its text below `MARKER` and values of options not given.

    Args:
        results: Results to add. A result replaces an older one that differs only in its value.

    Raises:
        MissingInputError: A file of the folder is missing.
        ConversionError: A file of the folder is not in the form that `neobert convert` writes.
        DataError: The front matter of the present card cannot be read.
        OutputError: The present card has no line `MARKER`, and its text would be lost.
    """
    folder = options.model
    present = _read_card(folder / CARD)
    match = _MODEL_ID.search(present.text)
    model_id = options.name or (match.group(1) if match else NO_MODEL_ID)
    title = "NeoBERT" if model_id == NO_MODEL_ID else model_id.rsplit("/", maxsplit=1)[-1]
    try:
        facts = read_facts(folder)
        data = cast(ModelCardData, present.data)
        data.license = options.license or data.license or "unknown"
        data.base_model = options.base_model or data.base_model
        data.datasets = list(options.dataset) or data.datasets
        data.language = list(options.language) or data.language
        if results:
            others = [old for old in data.eval_results or () if not any(map(old.is_equal_except_value, results))]
            data.eval_results = [*others, *results]
        # Without results, huggingface_hub would write the name as a separate field.
        data.model_name = title if data.eval_results else None
        pooled = ["sentence-transformers", "feature-extraction"] if facts["sentence_transformers"] else []
        data.tags = list(dict.fromkeys(["neobert", "encoder", *pooled, *(data.tags or [])]))
        # An exported folder with pooling is not yet an embedding model, but the start of contrastive fine-tuning.
        is_embedder = pooled and not facts["has_head"] and not facts["has_report"]
        task = "fill-mask" if facts["has_head"] else "feature-extraction"
        data.pipeline_tag = "sentence-similarity" if is_embedder else task
        data.library_name = "sentence-transformers" if is_embedder else "transformers"
        facts |= {"title": title, "model_id": model_id, "marker": MARKER}
        user_text = present.text.partition(MARKER)[2] or "\n"
        card = ModelCard.from_template(data, template_path=str(_TEMPLATE), user_text=user_text, **facts)
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        raise ConversionError(
            f"{folder}: config.json, {REPORT} or the front matter of {CARD} is not as a conversion writes it "
            f"({short_reason(error)}); convert the model again."
        ) from error
    replace_file(folder / CARD, str(card))


def read_results(records: Sequence[Path], model: Path) -> list[EvalResult]:
    """Return the GLUE and named-entity scores of a model, each the mean over seeds, for the Hub's model index.

    Args:
        records: --output folders of evaluations. Records of other models are ignored.
        model: Folder of the model.

    Raises:
        MissingInputError: The folders have no such scores of this model, or `model` has no config.json.
        DataError: A record cannot be read.
        ConversionError: A file of `model` refers to something outside of its folder, or is not valid.
    """
    from megatron_neobert.evaluation.models import fingerprint  # imports torch, which takes seconds
    from megatron_neobert.evaluation.report import find_records

    kinds = {"glue": "text-classification", "ner": "token-classification"}
    expected = fingerprint(model)
    runs = [run for run in find_records(records) if run.kind in kinds and run.model.fingerprint == expected]
    if not runs:
        raise MissingInputError(
            f"--results {' '.join(map(str, records))}: no record of GLUE or named-entity recognition is of {model} "
            f"(fingerprint {expected}); evaluate this folder."
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
    """Return the variables of model_card_template.md that describe the model, by name, from the files of its folder.

    Raises:
        MissingInputError: config.json, tokenizer_config.json or the weights are missing.
        ConversionError: A file is not in the form that `neobert convert` writes.
    """
    config = check_folder(folder)
    layout = config.get("model_type")
    if layout not in ("eurobert", "neobert", "llama") or (layout == "llama" and config.get("is_causal") is not False):
        raise ConversionError(
            f"{folder / 'config.json'}: model_type is {layout!r:.80}; only folders of neobert convert can have a card "
            "(eurobert, neobert, or llama with is_causal false)."
        )
    if layout == "neobert" and not (folder / MODELING_FILE).is_file():
        raise ConversionError(f"{folder} has no {MODELING_FILE}, which its card describes; convert the model again.")
    tokenizer = read_object(folder / "tokenizer_config.json")
    mask_token = tokenizer.get("mask_token")
    if not isinstance(mask_token, str):
        raise ConversionError(f"{folder / 'tokenizer_config.json'} has no mask_token; convert the model again.")
    report = read_object(folder / REPORT) if (folder / REPORT).exists() else {}
    run = report.get("training") or {}
    versions = report.get("versions") or {}
    return {
        "layout": layout,
        "config": config,
        "parameters": count_parameters(folder),
        "masked_text": json.dumps(f"Paris is the {mask_token} of France.", ensure_ascii=False),
        "lowercase": tokenizer.get("do_lower_case") is True,
        # False for a llama folder, whose head is not in the class of config.json.
        "has_head": any(str(name).endswith(("ForMaskedLM", "LMHead")) for name in config.get("architectures") or ()),
        "sentence_transformers": (folder / "modules.json").is_file(),
        "has_report": bool(report),
        **{name: report.get(name) or {} for name in ("source", "compared", "verification")},
        "versions": {name: versions[name] for name in ("torch", "transformers") if name in versions},
        **{name: run.get(name) or {} for name in ("data", "training", "optimizer")},
    }


def count_parameters(folder: Path) -> int:
    """Return the number of parameters in the *.safetensors of `folder`, without subfolders. Only headers are read.

    Raises:
        MissingInputError: There are no such files.
        ConversionError: A file is damaged.
    """
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ConversionError(f"{path}: not a safetensors file ({error}); fetch it again.") from error
    if not total:
        raise MissingInputError(f"{folder} has no *.safetensors; name the folder of a converted model.")
    return total


def _read_card(path: Path) -> ModelCard:
    """Return the card in a file, or an empty card if there is no file.

    Raises:
        OutputError: The card has no line `MARKER`.
        DataError: The front matter cannot be read.
    """
    if not path.exists():
        return ModelCard("---\n{}\n---\n")
    try:
        content = read_text(path)
        if MARKER in content:
            return ModelCard(content)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: its front matter cannot be read ({reason:.200}); fix or remove the file.") from error
    raise OutputError(
        f"{path} exists and has no marker line. Add the line {MARKER} above the text to keep, or remove the file."
    )
