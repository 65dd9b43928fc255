"""MTEB on one model: tasks one after another from stored data, and each result kept as it comes.

sentence-transformers sorts the texts by length and encodes batches of one size, so a score depends on the settings and
not on the order of the data. A folder's own pooling (modules.json) is used, and without one the mean of the token
states. Its prompts are not used: all models have the same instructions.

Instructions come from YAML: `types` holds the text before the texts of a kind of task, `tasks` that of single tasks.
Style `prefix`: the instruction and a space, before queries and before the texts of symmetric tasks, but not before
documents. Style `paper`: what the wrapper of NeoBERT's release writes, before documents as well: instruction [SEP]
[CLS] text. Source: chandar-lab/NeoBERT scripts/evaluation/wrappers.py, which cannot run as released; so it is unknown
whether the paper's numbers come from that spelling.

The ledger in OUTPUT/NAME/mteb decides what is done; results of mteb itself are beside it, in the layout of mteb's own
cache. OUTPUT/NAME/mteb.json has a table for each choice of tasks and settings. A category's mean is given only if every
one of its tasks has a score, and the overall mean (over tasks, not over categories) only if all have: a mean over some
of the tasks would not compare with anything. Missing tasks are named instead.
"""

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import mteb
import torch
import yaml
from mteb.abstasks.abstask import AbsTask
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import ConfigError, DataError, MissingInputError, yaml_reason
from megatron_neobert.evaluation.ledger import Ledger, key_of, open_ledger, origin_of, write_record
from megatron_neobert.evaluation.models import (
    LoadOptions,
    choose_device,
    fingerprint,
    load_sentence_transformer,
    load_tokenizer,
)
from megatron_neobert.evaluation.mteb_tasks import (
    PREFIX,
    choose_tasks,
    digest_of_files,
    flatten,
    load_task,
    stored_revision,
)
from megatron_neobert.evaluation.options import MtebOptions
from megatron_neobert.evaluation.paper import MTEB_CATEGORIES
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.runtime.atomic_files import read_text, sha256_of

_PROTOCOL = ("max_length", "batch_size", "dtype", "attention")  # options that change a score


def evaluate(options: MtebOptions) -> None:
    """Evaluate what the ledger does not hold, and write the tables.

    Raises:
        ConfigError: mteb has no such benchmark, task or language, or an instruction is missing.
        MissingInputError, DataError, ConversionError: Model or data cannot be used.
        OutputError: Another command is writing the output.
    """
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    warnings.filterwarnings("ignore", module=r"sklearn\.")  # not converged, ill-defined: mteb's protocol, for each draw
    tasks = choose_tasks(options.benchmark, options.tasks, options.languages, options.data_dir)
    prompts, digest = dict[str, str](), None
    if options.instructions != "none":
        path, tokenizer = find_config(options.instructions), load_tokenizer(options.model)
        prompts, digest = read_instructions(path, options.prompt_style, tokenizer), sha256_of(path)[:12]
        refuse_gaps(prompts, flatten(tasks))
    device, folder = choose_device(options.device), options.output / options.model.resolve().name
    protocol = {name: getattr(options, name) for name in _PROTOCOL}
    protocol |= {"instructions": digest, "prompt_style": options.prompt_style if digest else None}
    model = {"model": fingerprint(options.model)}
    units = units_of(flatten(tasks), options.data_dir, {**model, "protocol": protocol})
    missing = [name for name, unit in units.items() if unit is None]
    if missing and not options.skip_missing:
        raise MissingInputError(
            f"--data-dir {options.data_dir}: no data of {len(missing)} tasks ({', '.join(missing)}); run "
            "neobert fetch mteb --output DIR with the same --benchmark or --tasks on a machine with a network and "
            "copy DIR here, or leave them out with --skip-missing."
        )
    with open_ledger(folder / "mteb", device) as ledger:
        loading = LoadOptions(dtype=getattr(torch, options.dtype), device=device, attention=options.attention)
        scores = run_tasks(tasks, units, ledger, options, lambda: build_encoder(options, prompts, loading))
        what = list(options.tasks) or options.benchmark
        settings = {**protocol, "tasks": what, "languages": list(options.languages) if options.tasks else None}
        measured = [ledger.lines[key_of(unit)] for unit in units.values() if unit is not None]
        ledger.add({"table": settings, **model}, to_results(scores) | {"settings": settings}, origin_of(measured))
        lines = [line for line in ledger.lines.values() if "table" in line["unit"]]
        lines = [line for line in lines if line["unit"]["model"] == model["model"]]
        record, tables = folder / "mteb.json", [line["result"] for line in lines]
        write_record(record, "mteb", folder=options.model, settings=settings, results={"tables": tables}, lines=lines)
        print(f"\n{write_page('mteb', [record], folder)}\nwrote {record} and mteb.md")


def units_of(tasks: Sequence[AbsTask], data_dir: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the score of each task depends on, None for a task without data.

    Raises:
        DataError: Data is of another revision than the installed mteb's task.
    """
    units: dict[str, Any] = {}
    for task in tasks:
        data = task.metadata.revision  # of a local task, hashes of its files
        if not task.metadata.name.startswith(PREFIX):
            if stored_revision(data_dir, task) is None:
                units[task.metadata.name] = None
                continue
            data = digest_of_files(data_dir, task)
        of_task = {"task": task.metadata.name, "splits": list(task.eval_splits), "subsets": list(task.hf_subsets)}
        units[task.metadata.name] = {**common, **of_task, "data": data, "mteb": mteb.__version__}
    return units


def run_tasks(
    tasks: Sequence[AbsTask],
    units: Mapping[str, Any],
    ledger: Ledger,
    options: MtebOptions,
    build: Callable[[], Any],
) -> list["TaskScore"]:
    """Return a score, or the reason why there is none, for each task in its order.

    Args:
        units: What the score of each task depends on; None for a task without data.
        build: Builds the encoder; called once, and only if something has to be computed.
    """
    parts, encoder = flatten(tasks), None
    cache = mteb.ResultCache(ledger.path.parent)
    for number, task in enumerate(parts, start=1):
        name = task.metadata.name
        place, unit = f"{number}/{len(parts)} {name}", units[name]
        if unit is None:
            print(f"{place}: no data", flush=True)
            continue
        if (result := ledger.find(unit)) is not None:
            print(f"{place}: {100 * result['score']:.2f} (kept)", flush=True)
            continue
        if name.startswith(PREFIX):
            task.load_data()
        else:
            load_task(options.data_dir, task)
        encoder = encoder or build()
        show = sys.stderr.isatty()
        encoding: Any = {"batch_size": options.batch_size, "show_progress_bar": show, "convert_to_tensor": True}  # fp32
        found = mteb.evaluate(
            encoder,
            task,
            cache=cache,
            overwrite_strategy="always",  # the ledger decides
            co2_tracker=False,
            encode_kwargs=encoding,
            show_progress_bar=False,
        ).task_results[0]
        task.unload_data()
        result = ledger.add(unit, {"score": float(found.get_score()), "seconds": found.evaluation_time})
        print(f"{place}: {100 * result['score']:.2f} ({found.evaluation_time:.0f} s)", flush=True)
    results = {name: None if unit is None else ledger.find(unit) for name, unit in units.items()}
    return [_score(task, results) for task in tasks]


# --- the encoder


def read_instructions(path: Path, style: Literal["prefix", "paper"], tokenizer: Any) -> dict[str, str]:
    """Return the texts before texts, by the keys that mteb looks for: a task or a type, and NAME-document.

    Args:
        tokenizer: Of the model: style paper puts its separating and its first token between instruction and text.

    Raises:
        MissingInputError, DataError: There is no such file, or something else in it.
        ConfigError: Style paper, and the tokenizer has no such tokens.
    """
    if not path.is_file():
        raise MissingInputError(f"--instructions {path}: no such file; name a YAML file, or none.")
    try:
        content = yaml.safe_load(read_text(path))
        sections = msgspec.convert(content, dict[Literal["tasks", "types"], dict[str, str]])
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also msgspec's ValidationError
        raise DataError(
            f"{path}: expected YAML with the keys tasks and types, a text per name in each ({yaml_reason(error)})."
        ) from error
    end, prompts = " ", dict[str, str]()
    if style == "paper":
        first = tokenizer.bos_token or tokenizer.cls_token
        if first is None or tokenizer.sep_token is None:
            raise ConfigError("--prompt-style paper needs a tokenizer with [SEP] and [CLS]; use --prompt-style prefix.")
        end = f"{tokenizer.sep_token} {first}"
    for name, text in [pair for section in sections.values() for pair in section.items()]:
        prompts[name] = text + end if text else ""
        prompts[f"{name}-document"] = prompts[name] if style == "paper" else ""
    return prompts


def refuse_gaps(prompts: Mapping[str, str], tasks: Sequence[Any]) -> None:
    """Raise ConfigError if a task has no instruction: it would be measured another way."""
    names = {task.metadata.name for task in tasks if not {task.metadata.name, task.metadata.type} & prompts.keys()}
    if names:
        raise ConfigError(
            f"--instructions has no text for {', '.join(sorted(names))}, neither under tasks nor for the type under "
            "types; add one (an empty one is one)."
        )


def build_encoder(
    options: MtebOptions, prompts: dict[str, str], loading: LoadOptions
) -> SentenceTransformerEncoderWrapper:
    """Return the model, ready for `mteb.evaluate`; models with fewer positions truncate earlier.

    Raises:
        MissingInputError, ConversionError: The folder is not there, or cannot be loaded as an encoder of texts.
    """
    folder = options.model
    model = load_sentence_transformer(folder, loading, max_length=options.max_length)
    if model.max_seq_length < options.max_length:
        longest = f"after {model.max_seq_length} tokens, not {options.max_length}"
        print(f"{folder}: texts are truncated {longest}: no more positions")
    model.prompts, model.similarity_fn_name = {}, "cosine"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mteb calls functions of its own that it deprecates
        encoder = SentenceTransformerEncoderWrapper(model.eval())
    encoder.model_prompts = prompts or None  # not by the constructor, which knows no local tasks
    protocol = {name: getattr(options, name) for name in (*_PROTOCOL, "prompt_style")} | {"prompts": prompts}
    about = {"name": f"local/{folder.resolve().name}", "revision": f"{fingerprint(folder)}-{key_of(protocol)[:8]}"}
    encoder.mteb_model_meta = ModelMeta.create_empty(overwrites=about)
    return encoder


# --- results


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task of the benchmark: 100 x mteb's main score, or None with the reason."""

    name: str
    type: str
    metric: str
    score: float | None
    missing: str | None = None


def mean_of(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """Return the mean over tasks, each weighing the same; None unless all are there."""
    values = [task.score for task in scores if task.score is not None]
    complete = bool(scores) and len(values) == len(scores)
    mean = math.fsum(values) / len(values) if complete else None
    return {"value": mean, "there": len(values), "expected": len(scores)}


def to_results(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """Return scores and means for the record; of the categories that occur, those of Table 4 first."""
    types = [*MTEB_CATEGORIES, *sorted({task.type for task in scores} - set(MTEB_CATEGORIES))]
    groups = {type_: [task for task in scores if task.type == type_] for type_ in types}
    return {
        "average": mean_of(scores),
        "categories": {name: mean_of(group) for name, group in groups.items() if group},
        "tasks": {task.name: vars(task) for task in scores},
        "missing": [task.name for task in scores if task.score is None],
    }


def _score(task: AbsTask, results: Mapping[str, Any]) -> TaskScore:
    """Return the score of a task; that of an aggregate is the mean of its parts, and missing if a part is."""
    about: dict[str, Any] = {"name": task.metadata.name, "type": task.metadata.type, "metric": task.metadata.main_score}
    parts = {part.metadata.name: results[part.metadata.name] for part in flatten([task])}
    scores = {name: float(result["score"]) for name, result in parts.items() if result is not None}
    if absent := [name for name in parts if name not in scores]:
        reason = "no data" if absent == [task.metadata.name] else f"no data of {', '.join(absent)}"
        return TaskScore(**about, score=None, missing=reason)
    if undefined := [name for name, score in scores.items() if not math.isfinite(score)]:
        return TaskScore(**about, score=None, missing=f"not a number: the score of {', '.join(undefined)}")
    return TaskScore(**about, score=100 * math.fsum(scores.values()) / len(scores))
