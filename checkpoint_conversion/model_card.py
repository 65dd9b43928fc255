"""README.md of an exported folder: the model card that the Hub shows.

Front matter and text (model_card_template.md) follow from the files of the folder (config.json, conversion_report.json,
the headers of the weights) and from what only the user knows: licence, data, language. Written anew, the
card keeps what the user declared or added to its front matter before, and the text below its last line.
"""

import json
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open

from checkpoint_conversion.hf_folder import MODELING_FILE
from checkpoint_conversion.hf_reader import LAYOUTS
from megatron_neobert.errors import (
    ConfigError,
    ConversionError,
    DataError,
    MissingInputError,
    OutputError,
    short_reason,
)
from megatron_neobert.huggingface.checks import check_folder, read_object
from megatron_neobert.runtime.atomic_files import read_text, replace_file

CARD = "README.md"
REPORT = "conversion_report.json"
MARKER = "<!-- Text below this line stays when the card is written anew. -->"
NO_MODEL_ID = "path/to/this/folder"  # stands in the examples until the model's name on the Hub is known

_TEMPLATE = Path(__file__).with_name("model_card_template.md")
_LARGEST_CARD_BYTES = 1 << 20  # of a stranger's; ours take 5 KB

# The forms of the Hub's identifiers. Which of them exist changes over time, and the Hub checks it on upload.
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")
_MODEL_ID = re.compile(r'^model_id = "(.+)"$', flags=re.MULTILINE)  # as the examples of a card have it


def write_model_card(
    folder: Path,
    *,
    model_id: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    language: Sequence[str] = (),
) -> None:
    """Writes the card, or replaces it at once; what is not given stays as the present card has it.

    Args:
        model_id: Name of the model on the Hub, for the examples.
        license: The Hub's identifier of it; "unknown" until it is given.
        base_model: On the Hub, if training started from its weights.
        datasets: On the Hub.
        language: ISO 639 codes.

    Raises:
        ConfigError: An argument the Hub would refuse; all of them at once.
        MissingInputError, ConversionError, DataError: The folder holds no model of ours, or a card that is no card.
        OutputError: There is a card of somebody else's, which would be lost.
    """
    check_declared(model_id=model_id, license=license, base_model=base_model, datasets=datasets, language=language)
    facts = _read_facts(folder)
    present = _read_card(folder / CARD)
    if model_id is None:
        found = _MODEL_ID.search(present.text)
        model_id = found.group(1) if found else NO_MODEL_ID
    title = "NeoBERT" if model_id == NO_MODEL_ID else model_id.rsplit("/", maxsplit=1)[-1]
    data = cast(ModelCardData, present.data)
    data.license = license or data.license or "unknown"
    data.base_model = base_model or data.base_model
    data.datasets = list(datasets) or data.datasets
    data.language = list(language) or data.language
    data.model_name = title if data.eval_results else None  # part of the results, or a field of its own
    data.pipeline_tag = "fill-mask" if facts["has_head"] else "feature-extraction"
    tags = ["neobert", "encoder"]
    if facts["sentence_transformers"]:
        tags += ["sentence-transformers", "feature-extraction"]
        # Not so where an export has just got its pooling: such vectors are where fine-tuning starts.
        if not facts["has_head"] and not facts["has_report"]:
            data.pipeline_tag = "sentence-similarity"
    is_embedder = data.pipeline_tag == "sentence-similarity"
    data.library_name = "sentence-transformers" if is_embedder else "transformers"
    data.tags = list(dict.fromkeys([*tags, *(data.tags or [])]))
    try:
        card = ModelCard.from_template(
            data,
            template_path=str(_TEMPLATE),
            title=title,
            model_id=model_id,
            marker=MARKER,
            kept=present.text.partition(MARKER)[2] or "\n",
            **facts,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ConversionError(
            f"{folder}: config.json, {REPORT} or the front matter of {CARD} holds what a conversion does not write "
            f"({short_reason(error)}); convert the model again."
        ) from error
    replace_file(folder / CARD, str(card))


def read_declared(folder: Path) -> dict[str, str]:
    """Licence and base_model of a folder from the Hub, as far as its files or its place in the Hub's cache name them.

    What cannot be read or cannot be right is left out: it belongs to a stranger.
    """
    card, found = folder / CARD, {}
    if card.is_file() and card.stat().st_size <= _LARGEST_CARD_BYTES:
        try:
            data = ModelCard(read_text(card), ignore_metadata_errors=True).data.to_dict()
            found = {name: data.get(name) for name in ("license", "base_model")}
        except (ValueError, TypeError, yaml.YAMLError):
            pass
    if in_cache := re.search(r"/models--([^/]+?)--([^/]+)/snapshots/", f"{folder.absolute()}/"):
        found["base_model"] = "/".join(in_cache.groups())
    declared = {}
    for name, value in found.items():
        try:
            if isinstance(value, str) and value != "unknown":
                check_declared(**{name: value})
                declared[name] = value
        except ConfigError:
            continue
    return declared


def check_declared(
    *,
    model_id: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    language: Sequence[str] = (),
) -> None:
    """Refuses what the Hub would; `write_model_card` does so itself, a long conversion may want to know before.

    Raises:
        ConfigError: With every problem.
    """
    problems = []
    if license is not None and not _LICENSE.fullmatch(license):
        problems.append(f"license {license!r} is no identifier of the Hub, such as apache-2.0, mit or other.")
    problems += [
        f"language {code!r} is neither an ISO 639 code of two or three small letters, nor code or multilingual."
        for code in language
        if not _LANGUAGE.fullmatch(code)
    ]
    for kind, names in {"model": (model_id, base_model), "dataset": datasets}.items():
        for name in names:
            try:
                validate_repo_id(name or "unknown")
            except HFValidationError:
                problems.append(f"{name!r} cannot be the name of a {kind} on the Hub; expected owner/name.")
    if problems:
        raise ConfigError(problems)


def _read_facts(folder: Path) -> dict[str, Any]:
    """What the files of a folder hold of its model, by the names that the template has for it."""
    config = check_folder(folder)
    layout = config.get("model_type")
    if layout not in LAYOUTS or (layout == "llama" and config.get("is_causal") is not False):
        raise ConversionError(
            f"{folder / 'config.json'}: model_type is {layout!r:.80}; a card is written for {', '.join(LAYOUTS)} "
            "(with is_causal false), as neobert convert writes them."
        )
    if layout == "neobert" and not (folder / MODELING_FILE).is_file():
        raise ConversionError(f"{folder} has no {MODELING_FILE}, of which its card would speak; convert it first.")
    tokenizer, report_path = read_object(folder / "tokenizer_config.json"), folder / REPORT
    mask_token = tokenizer.get("mask_token")
    if not isinstance(mask_token, str):
        raise ConversionError(f"{folder / 'tokenizer_config.json'}: names no mask_token; convert the model again.")
    report = read_object(report_path) if report_path.exists() else {}
    run = _section(report, "training")
    versions = _section(report, "versions")
    return {
        "layout": layout,
        "config": config,
        "parameters": _count_parameters(folder),
        "masked_text": json.dumps(f"Paris is the {mask_token} of France.", ensure_ascii=False),
        "lowercase": tokenizer.get("do_lower_case") is True,
        # In the class that config.json names; of the llama layout it lies beside.
        "has_head": any(str(name).endswith(("ForMaskedLM", "LMHead")) for name in config.get("architectures") or ()),
        "sentence_transformers": (folder / "modules.json").is_file(),
        "has_report": bool(report),
        "source": _section(report, "source"),
        "compared": _section(report, "compared"),
        "verification": {name: one for name, one in _section(report, "verification").items() if isinstance(one, dict)},
        "versions": {name: versions[name] for name in ("torch", "transformers") if name in versions},
        **{name: _section(run, name) for name in ("data", "training", "optimizer")},
    }


def _section(report: dict[str, Any], name: str) -> dict[str, Any]:
    """One object of the report, or an empty one."""
    found = report.get(name)
    return found if isinstance(found, dict) else {}


def _count_parameters(folder: Path) -> int:
    """Of the model alone; reads headers, not weights."""
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
    """The present card, or one without a word.

    Raises:
        OutputError: There is one without the line below which text is kept.
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
