"""Which tasks a command means: a benchmark of mteb, single tasks of it, or local ones."""

import copy
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

import mteb
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.mteb.benchmarks import BENCHMARKS
from megatron_neobert.evaluation.mteb.local import PREFIX, local_task


def benchmark_tasks(name: str) -> list[AbsTask]:
    """The tasks of a benchmark in its own splits and languages; copies, because mteb gives everybody the same ones."""
    return copy.deepcopy(list(mteb.get_benchmark(name).tasks))


def tasks_by_name(names: Sequence[str], data_dir: Path) -> list[AbsTask]:
    """Tasks in the given order, English only; `local:NAME` reads data_dir/NAME.

    A task of the paper's benchmark is taken as that has it: MSMARCO's dev split, for example.

    Raises:
        ConfigError: mteb knows no such task, or a name comes twice.
        MissingInputError: A local task without files.
    """
    known = {task.metadata.name: task for name in BENCHMARKS for task in benchmark_tasks(name)}
    if len(set(names)) < len(names):
        raise ConfigError(f"--tasks {' '.join(names)} names a task twice; name each once.")
    tasks = []
    for name in names:
        if name.startswith(PREFIX):
            tasks.append(local_task(name.removeprefix(PREFIX), data_dir))
        else:
            tasks.append(known[name] if name in known else _any_task(name))
    return tasks


def flatten(tasks: Iterable[AbsTask]) -> list[AbsTask]:
    """Tasks with data: the twelve forums in place of CQADupstackRetrieval, which is their mean."""
    return [part for task in tasks for part in (task.tasks if isinstance(task, AbsTaskAggregate) else [task])]


def _any_task(name: str) -> AbsTask:
    try:
        return copy.deepcopy(mteb.get_task(name, languages=["eng"]))  # the parts of an aggregate belong to its class
    except KeyError:
        names = [task.metadata.name for task in mteb.get_tasks(languages=["eng"])]
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"local tasks are written {PREFIX}NAME."
        raise ConfigError(f"--tasks {name}: mteb {mteb.__version__} has no such task; {hint}") from None
