"""Evaluation of one model on MTEB, from stored data. Every score is stored as soon as it is computed.

The ledger in OUTPUT/NAME/mteb records the finished tasks; next to it are the results of mteb, in the layout of its
cache. OUTPUT/NAME/mteb.json has the scores of the last command. It has the mean of a category, or the overall mean over
tasks, only if all scores are there: a mean over some of the tasks would not be comparable.

Texts are pooled as the folder's modules.json says, and by the mean of the token states without one. The folder's
prompts `query` and `document` are used, unless a file of instructions gives all models the same. Scores depend on the
batch size, because sentence-transformers sorts the texts by length and pads each batch, but not on the order of the
data.

A YAML file has instructions for task types under `types` and for single tasks under `tasks`. There are two styles:

- `prefix`: instruction and space, before queries and the texts of symmetric tasks, but not before documents.
- `paper`: instruction [SEP] [CLS] text, before documents as well, like the wrapper of NeoBERT's release.
  Source: chandar-lab/NeoBERT scripts/evaluation/wrappers.py. The released script does not run, so it is unknown whether
  the paper's scores used this style.
"""

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from megatron_neobert.evaluation.ledger import Ledger, key_of, open_ledger, write_record
from megatron_neobert.evaluation.models import (
    LoadOptions,
    choose_device,
    fingerprint,
    load_sentence_transformer,
    load_tokenizer,
)
from megatron_neobert.evaluation.mteb_tasks import choose_tasks, digest_of_files, flatten, folder_of, load_task
from megatron_neobert.evaluation.options import MtebOptions
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.runtime.atomic_files import read_text, sha256_of

_PROTOCOL = ("max_length", "batch_size", "dtype", "attention")  # options that change scores


def evaluate(options: MtebOptions) -> None:
    """Evaluate the tasks without a score in the ledger. Write OUTPUT/MODEL/mteb.json and mteb.md, and print mteb.md.

    Raises:
        ConfigError: The benchmark, tasks, languages or device are invalid, or a task has no instruction.
        MissingInputError, DataError, ConversionError: The model, the data or the instructions cannot be used.
        OutputError: Another command is writing the output.
    """
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    # Under mteb's protocol some classifiers do not converge, and scikit-learn warns for each of them.
    warnings.filterwarnings("ignore", module=r"sklearn\.")
    tasks = choose_tasks(options.benchmark, options.tasks, options.languages)
    if options.instructions == "none" and options.prompt_style != "prefix":
        raise ConfigError("--prompt-style has no effect without --instructions; give a YAML file of instructions.")
    prompts, digest = dict[str, str](), "those of the folder"
    if options.instructions != "none":
        path, tokenizer = find_config(options.instructions), load_tokenizer(options.model)
        prompts, digest = read_instructions(path, options.prompt_style, tokenizer), sha256_of(path)[:12]
        require_instructions(prompts, flatten(tasks))
    device, folder = choose_device(options.device), options.output / model_name(options.model)
    protocol = {name: getattr(options, name) for name in _PROTOCOL}
    protocol |= {"instructions": digest, "prompt_style": options.prompt_style if prompts else None}
    common: dict[str, Any] = {"model": fingerprint(options.model), "protocol": protocol}
    units = build_units(flatten(tasks), options.data_dir, common)
    missing = [name for name, unit in units.items() if unit is None]
    if missing and not options.skip_missing:
        raise MissingInputError(
            f"--data-dir {options.data_dir}: no data of {len(missing)} tasks ({', '.join(missing)}) in the "
            f"revisions of mteb {mteb.__version__}; run neobert fetch mteb --output DIR with the same tasks and mteb "
            "on a machine with network and copy DIR here, or use --skip-missing."
        )
    with open_ledger(folder / "mteb", device) as ledger:
        loading = LoadOptions(dtype=getattr(torch, options.dtype), device=device, attention=options.attention)
        scores = run_tasks(tasks, units, ledger, options, lambda: build_encoder(options, prompts, loading))
        task_names = list(options.tasks) or options.benchmark
        settings = {**protocol, "tasks": task_names, "languages": list(options.languages) if options.tasks else None}
        lines = [ledger.lines[key_of(unit)] for unit in units.values() if unit is not None]
        record, model, results = folder / "mteb.json", options.model, to_results(scores)
        write_record(record, folder=model, fingerprint=common["model"], settings=settings, results=results, lines=lines)
        print(f"\n{write_page('mteb', [record], folder)}\nwrote {record} and mteb.md")


def build_units(tasks: Sequence[AbsTask], data_dir: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ledger unit of each task by the task's name. The value is None if the task has no stored data.

    The unit has a hash of the stored files, because the files of a revision can change after they were fetched. Raises
    DataError if the data has a pipe, a socket or a device, or refers to data elsewhere.

    A ledger unit is a dictionary of everything that a score depends on, including the entries of `common`.
    """
    units: dict[str, Any] = {}
    for task in tasks:
        name = task.metadata.name
        about = {"task": name, "splits": list(task.eval_splits), "subsets": list(task.hf_subsets)}
        about |= {"revision": task.metadata.revision, "mteb": mteb.__version__}
        folder = folder_of(data_dir, task)
        units[name] = {**common, **about, "data": digest_of_files(folder)} if folder.is_dir() else None
    return units


def run_tasks(
    tasks: Sequence[AbsTask],
    units: Mapping[str, Any],
    ledger: Ledger,
    options: MtebOptions,
    build: Callable[[], Any],
) -> dict[str, dict[str, Any]]:
    """Evaluate the tasks that the ledger lacks, add them to the ledger, and print a line for each task.

    Raises DataError if stored data is damaged.

    Args:
        units: Ledger unit of each task, or of each subtask of an aggregate, by name; None for a task without data.
        build: Builds the encoder. It is called at most once, before the first evaluation; its errors pass through.

    Returns:
        By task: "type", "metric", "score" (100 x mteb's main score) and, if it is None, "missing", the reason.
    """
    subtasks, encoder = flatten(tasks), None
    cache = mteb.ResultCache(ledger.path.parent)
    for number, task in enumerate(subtasks, start=1):
        name = task.metadata.name
        label, unit = f"{number}/{len(subtasks)} {name}", units[name]
        if unit is None:
            print(f"{label}: no data", flush=True)
            continue
        if (result := ledger.find(unit)) is not None:
            print(f"{label}: {100 * result['score']:.2f} (kept)", flush=True)
            continue
        load_task(options.data_dir, task)
        encoder = encoder or build()
        encode_kwargs: Any = {
            "batch_size": options.batch_size,
            "show_progress_bar": sys.stderr.isatty(),
            "convert_to_tensor": True,  # mteb converts tensors to float32, but not NumPy arrays
        }
        task_result = mteb.evaluate(
            encoder,
            task,
            cache=cache,
            overwrite_strategy="always",  # the ledger decides what is done
            co2_tracker=False,
            encode_kwargs=encode_kwargs,
            show_progress_bar=False,
        ).task_results[0]
        task.unload_data()
        seconds = task_result.evaluation_time
        result = ledger.add(unit, {"score": float(task_result.get_score()), "seconds": seconds})
        print(f"{label}: {100 * result['score']:.2f} ({seconds:.0f} s)", flush=True)
    results = {name: None if unit is None else ledger.find(unit) for name, unit in units.items()}
    return {task.metadata.name: _score(task, results) for task in tasks}


# --- the encoder


def read_instructions(path: Path, style: Literal["prefix", "paper"], tokenizer: Any) -> dict[str, str]:
    """Return the prompts of a YAML file. For each task or task type NAME, the keys are NAME and NAME-document.

    In style `prefix`, a prompt is the instruction and a space, and prompts of documents are empty. In style `paper`, a
    prompt is the instruction, the separator and the first special token of `tokenizer`, for documents too.

    Raises:
        MissingInputError: The file does not exist.
        DataError: The content is not YAML in the expected form.
        ConfigError: The style is `paper`, and the tokenizer lacks one of these tokens.
    """
    if not path.is_file():
        raise MissingInputError(f"--instructions {path}: no such file; name a YAML file, or none.")
    try:
        content = yaml.safe_load(read_text(path))
        sections = msgspec.convert(content, dict[Literal["tasks", "types"], dict[str, str]])
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise DataError(
            f"{path}: {yaml_reason(error)}. Write YAML with the keys tasks and types, and a text per name in each."
        ) from error
    end, prompts = " ", dict[str, str]()
    if style == "paper":
        first = tokenizer.bos_token or tokenizer.cls_token
        if first is None or tokenizer.sep_token is None:
            raise ConfigError("--prompt-style paper needs a tokenizer with [SEP] and [CLS]; use --prompt-style prefix.")
        end = f"{tokenizer.sep_token} {first}"
    for name, text in [item for section in sections.values() for item in section.items()]:
        prompts[name] = text + end if text.strip() else ""
        prompts[f"{name}-document"] = prompts[name] if style == "paper" else ""
    return prompts


def require_instructions(prompts: Mapping[str, str], tasks: Sequence[Any]) -> None:
    """Raise ConfigError if, for any task, `prompts` has neither its name nor its type as a key."""
    names = {task.metadata.name for task in tasks if not {task.metadata.name, task.metadata.type} & prompts.keys()}
    if names:
        raise ConfigError(
            f"--instructions has no text for {', '.join(sorted(names))}; add the name under tasks, or its type under "
            "types. The text may be empty."
        )


def build_encoder(
    options: MtebOptions, prompts: dict[str, str], loading: LoadOptions
) -> SentenceTransformerEncoderWrapper:
    """Return the model for `mteb.evaluate`. Without `prompts`, it uses the folder's prompts `query` and `document`.

    Print a line if the model truncates texts to fewer than `options.max_length` tokens. Raises MissingInputError if the
    folder is missing, or ConversionError if it cannot be loaded as an encoder.
    """
    folder = options.model
    model = load_sentence_transformer(folder, loading, max_length=options.max_length)
    if model.max_seq_length < options.max_length:
        lengths = f"after {model.max_seq_length} tokens, not {options.max_length}"
        print(f"{folder}: texts are truncated {lengths}, because of the model's longest input")
    prompts = prompts or {role: model.prompts[role] for role in ("query", "document") if model.prompts.get(role)}
    model.prompts, model.similarity_fn_name = {}, "cosine"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mteb calls its own deprecated functions
        encoder = SentenceTransformerEncoderWrapper(model.eval())
    encoder.model_prompts = prompts or None
    protocol = {name: getattr(options, name) for name in (*_PROTOCOL, "prompt_style")} | {"prompts": prompts}
    about = {"name": f"local/{model_name(folder)}", "revision": f"{fingerprint(folder)}-{key_of(protocol)[:8]}"}
    encoder.mteb_model_meta = ModelMeta.create_empty(overwrites=about)
    return encoder


# --- results


def mean_of(scores: Sequence[float | None]) -> float | None:
    """Return the mean score, or None if a score is missing."""
    values = [score for score in scores if score is not None]
    return math.fsum(values) / len(values) if len(values) == len(scores) else None


def to_results(tasks: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return "average", "categories" (mean by type) and "tasks", the argument: the scores by task from `run_tasks`."""
    types = sorted({task["type"] for task in tasks.values()})
    return {
        "average": mean_of([task["score"] for task in tasks.values()]),
        "categories": {name: mean_of([t["score"] for t in tasks.values() if t["type"] == name]) for name in types},
        "tasks": tasks,
    }


def _score(task: AbsTask, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return type, metric and 100 x the score of a task (mean of the subtasks of an aggregate).

    If a score is None, "missing" is the reason. `results` has {"score": fraction of 1}, or None without data, by the
    name of the task or of each subtask.
    """
    subtasks = [subtask.metadata.name for subtask in flatten([task])]
    scores = {name: float(results[name]["score"]) for name in subtasks if results[name] is not None}
    score, missing = None, None
    if absent := [name for name in subtasks if name not in scores]:
        missing = "no data" if absent == [task.metadata.name] else f"no data of {', '.join(absent)}"
    elif undefined := [name for name, value in scores.items() if not math.isfinite(value)]:
        missing = f"not a number: the score of {', '.join(undefined)}"
    else:
        score = 100 * math.fsum(scores.values()) / len(scores)
    return {"type": task.metadata.type, "metric": task.metadata.main_score, "score": score, "missing": missing}
