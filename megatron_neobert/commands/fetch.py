"""The command `neobert fetch mteb`: download the data of MTEB tasks.

Each task is written whole or not at all, and an existing one is kept. The same command therefore resumes an interrupted
download. If one download fails, the command continues with the next one.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_neobert.cli import option
from megatron_neobert.errors import MissingInputError, OutputError, short_reason
from megatron_neobert.evaluation.options import MtebTasks


@dataclass(frozen=True, kw_only=True)
class FetchMtebOptions(MtebTasks):
    output: Path = option(help="folder to write to", metavar="DIR")


def fetch_mteb(options: FetchMtebOptions) -> None:
    """Download the data of MTEB tasks, for machines without network access.

    Write OUTPUT/NAME/REVISION, unless it exists, and print a line for each task. REVISION comes from the
    installed mteb package.
    """
    from megatron_neobert.evaluation.mteb import choose_tasks, flatten, folder_of, store_task

    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    chosen = flatten(choose_tasks(options.benchmark, options.tasks, options.languages))
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{options.output}: cannot be created ({error.strerror}); name another folder.") from error
    failed = []
    for number, task in enumerate(chosen, start=1):
        name, state = task.metadata.name, "already fetched"
        if not folder_of(options.output, task).is_dir():
            try:
                store_task(options.output, task)
                state = "fetched"
            except Exception as error:  # several libraries raise errors of their own
                state = f"failed ({short_reason(error)})"
                failed.append(name)
        print(f"{number}/{len(chosen)} {name}: {state}", flush=True)
    if failed:
        raise MissingInputError(
            f"{options.output}: {len(failed)} of {len(chosen)} could not be fetched ({', '.join(failed)}). The reasons "
            "are above; run the same command again on a machine with network."
        )
