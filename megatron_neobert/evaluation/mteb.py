"""Evaluation of one model on MTEB, from stored data. Every score is stored as soon as it is computed.

OUTPUT/NAME/mteb is a cache of mteb. mteb finds a result by the revision of the model. We use a hash of everything that
the score depends on as the revision: files of the model and of the task's data, splits, settings and mteb's version.
OUTPUT/NAME/mteb.json and .md have the scores of the last command.

The data of a task is the repository of its data set at the revision of the installed mteb, in DATA_DIR/NAME/REVISION.
mteb loads this folder in place of the Hub. The folder appears whole or not at all. The cache of `datasets` is no
substitute: without network it returns the newest cached revision, and mteb's retrieval tasks ask the Hub for configs
and splits.

Texts are pooled as the folder's modules.json says; without this file, by the mean of the token states. The folder's
prompts `query` and `document` are used, unless a file of instructions gives all models the same. Scores depend on the
batch size, because sentence-transformers sorts the texts by length and pads each batch, but not on the order of the
data.

A YAML file has instructions for task types under `types` and for single tasks under `tasks`. There are two styles:

- `prefix`: instruction and space, before queries and the texts of symmetric tasks, but not before documents.
- `paper`: instruction [SEP] [CLS] text, before documents as well, like the wrapper of NeoBERT's release.
  Source: chandar-lab/NeoBERT scripts/evaluation/wrappers.py. The released script does not run, so it is unknown whether
  the paper's scores used this style.
"""

import copy
import hashlib
import math
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import mteb
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
from mteb.results import TaskResult

from megatron_neobert.config.cli import find_config
from megatron_neobert.errors import ConfigError, MissingInputError, suggestion
from megatron_neobert.evaluation.data import read_yaml, reading
from megatron_neobert.evaluation.ledger import describe_process, key_of, lock_results, write_record
from megatron_neobert.evaluation.models import (
    choose_device,
    fingerprint,
    load_sentence_transformer,
    load_tokenizer,
)
from megatron_neobert.evaluation.options import MtebOptions
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.runtime.atomic_files import sha256_of, sync_to_disk, temporary_path
from megatron_neobert.runtime.own_files import RECORD, create_folder, open_own

_PROTOCOL = ("max_length", "batch_size", "dtype", "attention")  # options that change scores


def run_mteb(options: MtebOptions) -> None:
    """Evaluate all tasks that have no stored score. Write OUTPUT/MODEL/mteb.json and mteb.md, and print mteb.md.

    Raises ConfigError if --prompt-style has no effect, and MissingInputError if a task has no stored data.
    """
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    # Under mteb's protocol some classifiers do not converge, and scikit-learn warns for each of them.
    warnings.filterwarnings("ignore", module=r"sklearn\.")
    tasks = choose_tasks(options.benchmark, options.tasks, options.languages)
    subtasks = {task.metadata.name: task for task in flatten(tasks)}
    if options.instructions == "none" and options.prompt_style != "prefix":
        raise ConfigError("--prompt-style has no effect without --instructions; give a YAML file of instructions.")
    prompts, digest = dict[str, str](), "those of the folder"
    if options.instructions != "none":
        path, tokenizer = find_config(options.instructions), load_tokenizer(options.model)
        prompts = read_instructions(path, options.prompt_style, tokenizer, list(subtasks.values()))
        digest = sha256_of(path)[:12]
    device, folder = choose_device(options.device), options.output / model_name(options.model)
    protocol = {name: getattr(options, name) for name in _PROTOCOL}
    protocol |= {"instructions": digest, "prompt_style": options.prompt_style if prompts else None}
    model = fingerprint(options.model)
    revisions = {
        name: f"{model}-{key_of(unit | protocol)}"
        for name, task in subtasks.items()
        if (unit := describe_task(task, options.data_dir)) is not None
    }
    missing = [name for name in subtasks if name not in revisions]
    if missing and not options.skip_missing:
        raise MissingInputError(
            f"--data-dir {options.data_dir}: no data of {len(missing)} tasks ({', '.join(missing)}) in the "
            f"revisions of mteb {mteb.__version__}; run neobert fetch mteb --output DIR with the same tasks and mteb "
            "on a machine with network and copy DIR here, or use --skip-missing."
        )
    with lock_results(folder / "mteb"):
        scores = measure_tasks(subtasks, revisions, folder / "mteb", options, prompts)
        languages = list(options.languages) if options.tasks else None
        settings = {**protocol, "tasks": list(options.tasks) or options.benchmark, "languages": languages}
        record, origin = folder / "mteb.json", describe_process(device)
        results, source = {"tasks": {task.metadata.name: to_score(task, scores) for task in tasks}}, options.model
        write_record(record, folder=source, fingerprint=model, settings=settings, results=results, origin=origin)
        print(f"\n{write_page('mteb', [record], folder)}\nwrote {record} and mteb.md")


def describe_task(task: AbsTask, data_dir: Path) -> dict[str, Any] | None:
    """Return everything, besides model and settings, that a task's score depends on, or None if no data is stored.

    The stored files are hashed, because the files of a revision can change after they were fetched.
    """
    folder = folder_of(data_dir, task)
    if not folder.is_dir():
        return None
    with reading(folder):
        # Not the folder .cache, in which huggingface_hub notes times of downloads.
        names = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        lines = [f"{name} {sha256_of(names[name])}\n" for name in sorted(names) if name.parts[0] != ".cache"]
    # Splits and subsets, because mteb's mean is over all that a stored result has.
    return {
        "task": task.metadata.name,
        "splits": list(task.eval_splits),
        "subsets": list(task.hf_subsets),
        "data": hashlib.sha256("".join(lines).encode()).hexdigest()[:16],
        "mteb": mteb.__version__,
    }


def measure_tasks(
    tasks: Mapping[str, AbsTask],
    revisions: Mapping[str, str],
    folder: Path,
    options: MtebOptions,
    prompts: dict[str, str],
) -> dict[str, float]:
    """Return {task: main score as a fraction of 1} for all tasks with a revision. Print a line for each task.

    Scores in the cache `folder` are read, not measured again. The encoder is built before the first measurement.
    `revisions` maps each task that has data to the revision of the model.
    """
    cache, encoder, scores = mteb.ResultCache(folder), None, dict[str, float]()
    for number, (name, task) in enumerate(tasks.items(), start=1):
        label = f"{number}/{len(tasks)} {name}"
        if name not in revisions:
            print(f"{label}: no data", flush=True)
            continue
        identity = {"name": f"local/{model_name(options.model)}", "revision": revisions[name]}
        meta, note = ModelMeta.create_empty(overwrites=identity), "kept"
        path = Path(cache.get_task_result_path(name, meta))
        result = None
        if os.path.lexists(path):
            with suppress(ValueError), open_own(path) as stream:
                stream.seek(0)
                result = TaskResult.model_validate_json(stream.read())
        if result is None or result.get_missing_evaluations(task):
            load_task(options.data_dir, task)
            encoder = encoder or build_encoder(options, prompts)
            encoder.mteb_model_meta = meta
            encode_kwargs: Any = {
                "batch_size": options.batch_size,
                "show_progress_bar": sys.stderr.isatty(),
                "convert_to_tensor": True,  # mteb converts tensors to float32, but not NumPy arrays
            }
            mteb.evaluate(
                encoder,
                task,
                cache=cache,
                # A damaged file of a killed command is no result.
                overwrite_strategy="always" if result is None else "only-missing",
                co2_tracker=False,
                encode_kwargs=encode_kwargs,
                show_progress_bar=False,
            )
            task.unload_data()
            # As it is stored, with rounded scores.
            result = TaskResult.from_disk(path)
            note = f"{result.evaluation_time:.0f} s"
        scores[name] = float(result.get_score())
        print(f"{label}: {100 * scores[name]:.2f} ({note})", flush=True)
    return scores


# --- the encoder


def read_instructions(
    path: Path, style: Literal["prefix", "paper"], tokenizer: Any, tasks: Sequence[Any]
) -> dict[str, str]:
    """Return the prompts of a YAML file. For each task or task type NAME, the keys are NAME and NAME-document.

    Raises ConfigError if the style is `paper` and the tokenizer lacks [SEP] or [CLS], or if the file contains neither
    the name nor the type of one of the `tasks`.
    """
    content, remedy = dict[Literal["tasks", "types"], dict[str, str]], "write the keys tasks and types, each with texts"
    sections = read_yaml("--instructions", path, content, remedy=remedy)
    end, prompts = " ", dict[str, str]()
    if style == "paper":
        first = tokenizer.bos_token or tokenizer.cls_token
        if first is None or tokenizer.sep_token is None:
            raise ConfigError("--prompt-style paper needs a tokenizer with [SEP] and [CLS]; use --prompt-style prefix.")
        end = f"{tokenizer.sep_token} {first}"
    for name, text in [item for section in sections.values() for item in section.items()]:
        prompts[name] = text + end if text.strip() else ""
        prompts[f"{name}-document"] = prompts[name] if style == "paper" else ""
    names = {task.metadata.name for task in tasks if not {task.metadata.name, task.metadata.type} & prompts.keys()}
    if names:
        raise ConfigError(
            f"--instructions has no text for {', '.join(sorted(names))}; add the name under tasks, or its type under "
            "types. The text may be empty."
        )
    return prompts


def build_encoder(options: MtebOptions, prompts: dict[str, str]) -> SentenceTransformerEncoderWrapper:
    """Return the model for `mteb.evaluate`. If `prompts` is empty, use the folder's prompts `query` and `document`.

    Print a line if the model truncates texts to fewer than `options.max_length` tokens.
    """
    folder = options.model
    model = load_sentence_transformer(folder, options, max_length=options.max_length)
    if model.max_seq_length < options.max_length:
        lengths = f"after {model.max_seq_length} tokens, not {options.max_length}"
        print(f"{folder}: texts are truncated {lengths}, because of the model's longest input")
    prompts = prompts or {role: model.prompts[role] for role in ("query", "document") if model.prompts.get(role)}
    model.prompts, model.similarity_fn_name = {}, "cosine"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mteb calls its own deprecated functions
        encoder = SentenceTransformerEncoderWrapper(model.eval())
    encoder.model_prompts = prompts or None
    return encoder


# --- results


def to_score(task: AbsTask, scores: Mapping[str, float]) -> dict[str, Any]:
    """Return a task's type, metric and score in per cent. If the score is None, "missing" states the reason.

    The score of an aggregate is the mean of its subtasks. `scores` maps names of tasks, and of aggregates' subtasks, to
    fractions of 1. Tasks without data have no entry.
    """
    subtasks = [subtask.metadata.name for subtask in flatten([task])]
    score, missing = None, None
    if absent := [name for name in subtasks if name not in scores]:
        missing = "no data" if absent == [task.metadata.name] else f"no data of {', '.join(absent)}"
    elif undefined := [name for name in subtasks if not math.isfinite(scores[name])]:
        missing = f"not a number: the score of {', '.join(undefined)}"
    else:
        score = 100 * math.fsum(scores[name] for name in subtasks) / len(subtasks)
    return {"type": task.metadata.type, "metric": task.metadata.main_score, "score": score, "missing": missing}


# --- tasks


def choose_tasks(benchmark: str, names: Sequence[str], languages: Sequence[str]) -> list[AbsTask]:
    """Return copies of the tasks in `names` or, if `names` is empty, of all tasks in the benchmark.

    If English is the only language, a named task has the settings of the English MTEB benchmark that contains it.
    MSMARCO, for example, uses its dev split. Subsets of a named task in other languages are excluded.

    Raises ConfigError if mteb has no such benchmark, task or language, or if the arguments exclude each other.
    """
    if names and benchmark != MTEB_PAPER:
        raise ConfigError(f"--benchmark {benchmark} and --tasks {' '.join(names)} exclude each other; remove one.")
    if not names and list(languages) not in ([], ["eng"]):
        raise ConfigError(f"--languages {' '.join(languages)} has no effect without --tasks; name tasks, or remove it.")
    # Tasks are copied, because mteb returns the same objects to every caller.
    if not names:
        try:
            return copy.deepcopy(list(mteb.get_benchmark(benchmark).tasks))
        except KeyError:
            known = [known_benchmark.name for known_benchmark in mteb.get_benchmarks()]
            raise ConfigError(
                f"--benchmark {benchmark}: mteb has no such benchmark{suggestion(benchmark, known, otherwise='.')}"
            ) from None
    if len(set(names)) < len(names):
        raise ConfigError(f"--tasks {' '.join(names)} names a task twice; name each once.")
    english: dict[str, AbsTask] = {}
    if list(languages) == ["eng"]:
        english = {task.metadata.name: task for name in MTEB_BENCHMARKS for task in mteb.get_benchmark(name).tasks}
    return [copy.deepcopy(english[name]) if name in english else _get_task(name, languages) for name in names]


def flatten(tasks: Iterable[AbsTask]) -> list[AbsTask]:
    """Return the tasks with aggregates replaced by their subtasks: CQADupstackRetrieval by its twelve forums."""
    return [subtask for task in tasks for subtask in (task.tasks if isinstance(task, AbsTaskAggregate) else [task])]


def _get_task(name: str, languages: Sequence[str]) -> AbsTask:
    try:
        # Copied, because the subtasks of an aggregate belong to its class.
        task = copy.deepcopy(mteb.get_task(name, languages=list(languages)))
    except KeyError:
        known = [task.metadata.name for task in mteb.get_tasks()]
        raise ConfigError(
            f"--tasks {name}: mteb {mteb.__version__} has no such task{suggestion(name, known, otherwise='.')}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--languages {' '.join(languages)}: {error}") from None
    if not task.hf_subsets:
        raise ConfigError(f"--tasks {name} has no texts in --languages {' '.join(languages)}; name other languages.")
    return task


# --- stored data


def folder_of(data_dir: Path, task: AbsTask) -> Path:
    """Return the folder of a task's data at the revision that the installed mteb uses."""
    return data_dir / task.metadata.name / str(task.metadata.revision)


def store_task(data_dir: Path, task: AbsTask) -> None:
    """Download a task's data set to `folder_of(data_dir, task)`, which must not exist yet."""
    target = folder_of(data_dir, task)
    temporary = temporary_path(target)
    create_folder(temporary)
    huggingface_hub.snapshot_download(
        task.metadata.dataset["path"], repo_type="dataset", revision=task.metadata.revision, local_dir=temporary
    )
    (temporary / RECORD).unlink()
    temporary.rename(target)
    sync_to_disk(target.parent)


def load_task(data_dir: Path, task: AbsTask) -> None:
    """Make mteb load a task's data from `folder_of(data_dir, task)`. `task.unload_data` restores the task."""
    folder = folder_of(data_dir, task)
    with reading(folder):
        dataset = {**task.metadata.dataset, "path": str(folder)}
        task.metadata = task.metadata.model_copy(update={"dataset": dataset})
        task.load_data()
