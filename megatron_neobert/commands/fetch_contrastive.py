"""Command: fetch the datasets of contrastive fine-tuning, on a machine with network.

    neobert fetch contrastive --config evaluation/contrastive --data-dir DIR [--datasets KEY...]

Writes DATA_DIR/KEY.parquet with the columns query, positive and negatives, whole or not at all; files that are there
are kept, so that the same command resumes. Copy the folder to where there is no network.
"""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import CommandParser, ConfigError, MissingInputError, NeoBERTError, OutputError
from megatron_neobert.runtime.atomic_files import make_folder

if TYPE_CHECKING:  # --help answers without importing datasets
    from megatron_neobert.evaluation.contrastive.config import DatasetSource


def main() -> None:
    """Reads the arguments and fetches."""
    arguments = _parse()
    from megatron_neobert.evaluation.contrastive.config import read_config

    config = read_config(arguments.config)
    keys = arguments.datasets or [key for key, source in config.datasets.items() if source.default]
    nowhere = [key for key in keys if key not in config.datasets or config.datasets[key].hub is None]
    if nowhere:
        raise ConfigError(
            f"{arguments.config} names no hub for {', '.join(nowhere)}; add one, or write KEY.parquet yourself with "
            "the columns query, positive and negatives."
        )
    try:
        made = make_folder(arguments.data_dir)
    except OSError as error:
        raise OutputError(f"--data-dir {arguments.data_dir}: cannot be created ({error.strerror}).") from error
    failed = []
    for key in keys:  # one that its source has lost must not keep the others from coming
        try:
            _fetch(key, config.datasets[key], arguments.data_dir / f"{key}.parquet")
        except NeoBERTError as error:
            print(f"failed: {error}", flush=True)
            failed.append(key)
    if failed:
        with suppress(OSError):  # it holds what could be fetched
            for folder in made:
                folder.rmdir()
        raise MissingInputError(
            f"--data-dir {arguments.data_dir}: {len(failed)} of {len(keys)} datasets could not be fetched "
            f"({', '.join(failed)}); look at the reasons above and start the same command again."
        )


def _fetch(key: str, source: "DatasetSource", path: Path) -> None:
    from megatron_neobert.evaluation.contrastive.data import fetch_pairs
    from megatron_neobert.runtime.atomic_files import replacing

    if path.exists():
        print(f"kept {path}")
        return
    pairs = fetch_pairs(key, source)
    with replacing(path) as temporary:
        pairs.to_parquet(str(temporary))
    print(f"wrote {path}: {len(pairs):,} pairs from {source.hub}", flush=True)


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--config", required=True, type=find_config, metavar="FILE", help="as for neobert finetune")
    parser.add_argument("--data-dir", required=True, type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument("--datasets", nargs="+", metavar="KEY", help="(default: all but those with default: false)")
    return parser.parse_args()
