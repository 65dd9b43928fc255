"""Command: the data of MTEB's tasks, for machines without a network.

Runs where there is one. Loads each task as mteb does and writes what it then holds to OUTPUT/tasks/<task>, then reads
it back with the network switched off; copy OUTPUT and give it to neobert evaluate mteb as --data-dir. The same command
resumes after an interruption. Where a cache of the Hugging Face libraries is filled already, HF_HUB_OFFLINE=1 makes it
the only source.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron_neobert
from megatron_neobert.errors import CommandParser, ConfigError, MissingInputError, short_reason
from megatron_neobert.evaluation.reported_numbers import MTEB_BENCHMARKS, MTEB_PAPER
from megatron_neobert.huggingface.offline import go_offline


def main() -> int:
    """Fetches, checks, and names what is not there; returns the exit code of the check."""
    arguments = _parse()
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    if arguments.check:
        go_offline()
        _check(arguments)
        return 0
    if failed := _fetch(arguments):
        raise MissingInputError(
            f"--output {arguments.output}: {len(failed)} tasks could not be fetched ({', '.join(failed)}); look at the "
            "reasons above and start the same command again."
        )
    # Another process: these libraries look at the environment once.
    chosen = ["--tasks", *arguments.tasks] if arguments.tasks else ["--benchmark", arguments.benchmark]
    command = [sys.executable, "-m", "megatron_neobert", "fetch", "mteb", "--check"]
    command += ["--output", str(arguments.output), *chosen]
    own = {"PYTHONPATH": str(Path(megatron_neobert.__file__).parents[1])}  # this checkout before any that is installed
    return subprocess.run(command, env={**os.environ, **own}, check=False).returncode


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--output", required=True, type=Path, metavar="DIR", help="folder to fill")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--benchmark", choices=MTEB_BENCHMARKS, default=MTEB_PAPER, help="all its tasks (default: %(default)s)"
    )
    what.add_argument("--tasks", nargs="+", metavar="NAME", help="these tasks of mteb")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--refresh", action="store_true", help="fetch tasks again whose data is of another revision")
    how.add_argument("--check", action="store_true", help="fetch nothing: read what is there, without a network")
    arguments = parser.parse_args()
    if local := [name for name in arguments.tasks or [] if name.startswith("local:")]:
        raise ConfigError(f"--tasks {' '.join(local)}: local tasks are files of yours; put them into --data-dir.")
    return arguments


def _tasks(arguments: argparse.Namespace) -> list[Any]:
    from megatron_neobert.evaluation.mteb.tasks import benchmark_tasks, flatten, tasks_by_name

    if arguments.tasks:
        return flatten(tasks_by_name(arguments.tasks, arguments.output))
    return flatten(benchmark_tasks(arguments.benchmark))


def _fetch(arguments: argparse.Namespace) -> list[str]:
    """Names of the tasks that failed: one that the source has lost must not keep the other 66 from coming."""
    from megatron_neobert.evaluation.mteb.run import store_task, stored_revision

    tasks, failed = _tasks(arguments), []
    for number, task in enumerate(tasks, start=1):
        place = f"{number}/{len(tasks)} {task.metadata.name}"
        stored = stored_revision(arguments.output, task)
        if stored is not None and not (arguments.refresh and stored != task.metadata.revision):
            print(f"{place}: there already", flush=True)
            continue
        try:
            store_task(arguments.output, task)
        except Exception as error:  # of a dozen libraries, and reported
            reason = short_reason(error)
            print(f"{place}: failed ({reason})", flush=True)
            failed.append(task.metadata.name)
            continue
        print(f"{place}: fetched", flush=True)
    return failed


def _check(arguments: argparse.Namespace) -> None:
    from megatron_neobert.evaluation.mteb.run import load_task, stored_revision

    tasks = _tasks(arguments)
    if missing := [task.metadata.name for task in tasks if stored_revision(arguments.output, task) is None]:
        raise MissingInputError(f"--output {arguments.output}: no data of {len(missing)} tasks: {', '.join(missing)}.")
    for task in tasks:
        load_task(arguments.output, task)
        task.unload_data()
    print(f"{arguments.output}: {len(tasks)} tasks can be read without a network")
