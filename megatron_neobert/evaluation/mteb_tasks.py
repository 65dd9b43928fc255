"""Tasks for MTEB evaluations, and their stored data.

The data of a task is the repository of its data set at the revision of the installed mteb, in DATA_DIR/NAME/REVISION.
mteb loads this folder in place of the Hub. The folder appears whole or not at all. The cache of `datasets` is no
substitute: without network it returns the newest cached revision, and mteb's retrieval tasks ask the Hub for configs
and splits.
"""

import copy
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import huggingface_hub
import mteb
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate

from megatron_neobert.errors import ConfigError, suggestion
from megatron_neobert.evaluation.data import reading
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER
from megatron_neobert.runtime.atomic_files import sha256_of, sync_to_disk, temporary_path
from megatron_neobert.runtime.own_files import RECORD, create_folder


def choose_tasks(benchmark: str, names: Sequence[str], languages: Sequence[str]) -> list[AbsTask]:
    """Return copies of the tasks with these names. Without names, return all tasks of the benchmark.

    If English is the only language, a named task has the settings of the English MTEB benchmark that contains it.
    MSMARCO, for example, uses its dev split.

    Args:
        names: Names of mteb's tasks.
        languages: ISO 639-3 codes. Subsets of a named task in other languages are excluded.

    Raises:
        ConfigError: mteb has no such benchmark, task or language, or a name is repeated, or names are given together
            with a benchmark that is not the default, or languages without names.
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


def digest_of_files(folder: Path) -> str:
    """Return 16 hex digits of a hash over names and contents of all files of a task's data."""
    with reading(folder):
        # Not the folder .cache, in which huggingface_hub notes times of downloads.
        names = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        lines = [f"{name} {sha256_of(names[name])}\n" for name in sorted(names) if name.parts[0] != ".cache"]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def store_task(data_dir: Path, task: AbsTask) -> None:
    """Download the repository of a task's data set to `folder_of(data_dir, task)`, which must not exist."""
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
    """Let mteb load a task from its folder. `task.unload_data` restores the task."""
    folder = folder_of(data_dir, task)
    with reading(folder):
        dataset = {**task.metadata.dataset, "path": str(folder)}
        task.metadata = task.metadata.model_copy(update={"dataset": dataset})
        task.load_data()
