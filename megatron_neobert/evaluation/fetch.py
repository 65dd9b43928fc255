"""Commands that download evaluation data, for machines without network access.

Each dataset or task is written whole or not at all, and an existing one is kept. The same command therefore resumes an
interrupted download. If one download fails, the command continues with the next one.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import ConfigError, MissingInputError, OutputError, short_reason
from megatron_neobert.evaluation.options import FetchContrastiveOptions, FetchMtebOptions
from megatron_neobert.runtime.atomic_files import replacing


def fetch_all(output: Path, names: Sequence[str], fetch: Callable[[str], str]) -> None:
    """Call `fetch` for every name, and print one line per name. After a failure, the remaining names are still fetched.

    Args:
        output: Folder to create. It may exist.
        fetch: Downloads one dataset or task, and returns the text to print. Any exception is a failed download.

    Raises:
        OutputError: The folder cannot be created.
        MissingInputError: A download failed. Raised after the last name; the reasons were printed.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{output}: cannot be created ({error.strerror}); name another folder.") from error
    failed = []
    for number, name in enumerate(names, start=1):
        try:
            print(f"{number}/{len(names)} {name}: {fetch(name)}", flush=True)
        except Exception as error:  # a dozen libraries raise errors of their own
            print(f"{number}/{len(names)} {name}: failed ({short_reason(error)})", flush=True)
            failed.append(name)
    if failed:
        raise MissingInputError(
            f"{output}: {len(failed)} of {len(names)} could not be fetched ({', '.join(failed)}). The reasons are "
            "above; run the same command again on a machine with network."
        )


def fetch_contrastive(options: FetchContrastiveOptions) -> None:
    """Download the datasets of contrastive fine-tuning as Parquet files, for machines without network access.

    Write DATA_DIR/KEY.parquet, unless it exists, and print a line for each of `options.datasets`. If the option
    is empty, all datasets whose `default` in the YAML file is true are fetched.

    Raises:
        ConfigError: The YAML file is invalid, lacks a requested dataset, or has no `hub` for a dataset.
        MissingInputError: There is no YAML file; or a download failed, and the others were still fetched.
        OutputError: The folder cannot be created.
    """
    from megatron_neobert.evaluation.embed_data import fetch_pairs, read_config

    config = read_config(find_config(options.config))
    keys = options.datasets or [key for key, source in config.datasets.items() if source.default]
    if without_hub := [key for key in keys if key not in config.datasets or config.datasets[key].hub is None]:
        raise ConfigError(
            f"{options.config} has no hub for {', '.join(without_hub)}; add one, or write KEY.parquet yourself with "
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
    """Download the data of MTEB tasks, for machines without network access.

    Write OUTPUT/NAME/REVISION, unless it exists, and print a line for each task. REVISION is that of the installed
    mteb.

    Raises:
        ConfigError: A task is repeated, or mteb has no such task, benchmark or language.
        MissingInputError: A download failed. The other tasks were still fetched.
        OutputError: The folder cannot be created.
    """
    from megatron_neobert.evaluation.mteb_tasks import choose_tasks, flatten, folder_of, store_task

    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    chosen = flatten(choose_tasks(options.benchmark, options.tasks, options.languages))
    tasks = {task.metadata.name: task for task in chosen}

    def fetch(name: str) -> str:
        if folder_of(options.output, tasks[name]).is_dir():
            return "already fetched"
        store_task(options.output, tasks[name])
        return "fetched"

    fetch_all(options.output, list(tasks), fetch)
