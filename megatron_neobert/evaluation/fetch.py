"""Fetching of data on a machine with network: the datasets of contrastive fine-tuning, MTEB.

Each thing to fetch appears whole or not at all, and is kept if it is there, so that the same command resumes. A thing
that its source has lost does not keep the others from coming.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import ConfigError, MissingInputError, OutputError, short_reason
from megatron_neobert.evaluation.options import FetchContrastiveOptions, FetchMtebOptions
from megatron_neobert.runtime.atomic_files import make_folder, replacing


def fetch_all(output: Path, names: Sequence[str], fetch: Callable[[str], str]) -> None:
    """Fetch everything into a folder; `fetch` returns what it has fetched, in words.

    Raises:
        OutputError: The folder cannot be created.
        MissingInputError: Something could not be fetched; its reason was printed.
    """
    try:
        made = make_folder(output)
    except OSError as error:
        raise OutputError(f"{output}: cannot be created ({error.strerror}).") from error
    failed = []
    for number, name in enumerate(names, start=1):
        try:
            print(f"{number}/{len(names)} {name}: {fetch(name)}", flush=True)
        except Exception as error:  # of a dozen libraries, and reported
            print(f"{number}/{len(names)} {name}: failed ({short_reason(error)})", flush=True)
            failed.append(name)
    if failed:
        with suppress(OSError):  # it holds what could be fetched
            for folder in made:
                folder.rmdir()
        raise MissingInputError(
            f"{output}: {len(failed)} of {len(names)} could not be fetched ({', '.join(failed)}); look at the reasons "
            "above and start the same command again on a machine with network."
        )


def fetch_contrastive(options: FetchContrastiveOptions) -> None:
    """Fetch the datasets of contrastive fine-tuning as parquet files, for machines without network.

    Raises:
        ConfigError: The file names no source of a dataset.
    """
    from megatron_neobert.evaluation.embed_data import fetch_pairs, read_config

    config = read_config(find_config(options.config))
    keys = options.datasets or [key for key, source in config.datasets.items() if source.default]
    if nowhere := [key for key in keys if key not in config.datasets or config.datasets[key].hub is None]:
        raise ConfigError(
            f"{options.config} names no hub for {', '.join(nowhere)}; add one, or write KEY.parquet yourself with "
            "the columns query, positive and negatives."
        )

    def fetch(key: str) -> str:
        path, source = options.data_dir / f"{key}.parquet", config.datasets[key]
        if path.exists():
            return f"kept {path}"
        pairs = fetch_pairs(key, source)
        with replacing(path) as temporary:
            pairs.to_parquet(str(temporary))
        return f"wrote {path}, {len(pairs):,} pairs from {source.hub}"

    fetch_all(options.data_dir, keys, fetch)


def fetch_mteb(options: FetchMtebOptions) -> None:
    """Fetch the data of MTEB's tasks, for machines without a network.

    Where a cache of the Hugging Face libraries is filled already, HF_HUB_OFFLINE=1 makes it the only source.

    Raises:
        ConfigError: A task is a local one, or mteb has no such task, benchmark or language.
        MissingInputError: Something could not be fetched.
    """
    from megatron_neobert.evaluation.mteb_tasks import PREFIX, choose_tasks, flatten, store_task, stored_revision

    if local := [name for name in options.tasks if name.startswith(PREFIX)]:
        raise ConfigError(f"--tasks {' '.join(local)}: local tasks are files of yours; put them into --data-dir.")
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    tasks = {
        task.metadata.name: task
        for task in flatten(choose_tasks(options.benchmark, options.tasks, options.languages, options.output))
    }

    def fetch(name: str) -> str:
        if stored_revision(options.output, tasks[name]) == tasks[name].metadata.revision:
            return "there already"
        store_task(options.output, tasks[name])
        return "fetched"

    fetch_all(options.output, list(tasks), fetch)
