"""Command: GLUE's data as parquet files, for machines without network.

    neobert fetch glue --output glue        # then: neobert evaluate glue --data-dir glue

Runs where there is a network. One folder per task, one file per split; what is there already is kept, and a file
appears whole or not at all.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.errors import CommandParser, ConfigError, MissingInputError

if TYPE_CHECKING:
    from datasets import DatasetDict

DATA_SET = "nyu-mll/glue"


def main() -> None:
    """Fetches every task that is not there, and counts its rows."""
    parser = CommandParser(__doc__)
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for a folder per task")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="such as cola sst2 (default: all, and ax)")
    arguments = parser.parse_args()
    from megatron_neobert.evaluation.glue.tasks import DIAGNOSTIC, TASKS

    known = {**TASKS, DIAGNOSTIC.name: DIAGNOSTIC}
    unknown = [name for name in arguments.tasks or [] if name not in known]
    if unknown:
        raise ConfigError(f"--tasks {' '.join(unknown)}: the data set has {', '.join(known)}.")
    for name in arguments.tasks or known:
        folder, splits = arguments.output / name, known[name].rows
        if all((folder / f"{split}.parquet").is_file() for split in splits):
            print(f"{folder}: there already")
            continue
        rows = write_splits(_download(name), folder)
        print(f"{folder}: {', '.join(f'{split} {count:,}' for split, count in rows.items())}")
        for split, expected in splits.items():
            if rows.get(split) != expected:
                print(f"warning: {name} {split} has {rows.get(split, 0):,} rows, the benchmark {expected:,}")


def _download(name: str) -> "DatasetDict":
    import datasets

    try:
        return datasets.load_dataset(DATA_SET, name)
    except (OSError, ValueError) as error:  # what the library raises without a network or the data set
        raise MissingInputError(
            f"{DATA_SET} {name} cannot be fetched ({' '.join(str(error).split())[:300]}); run this on a machine with "
            "network."
        ) from error


def write_splits(splits: "DatasetDict", folder: Path) -> dict[str, int]:
    """One parquet file per split; the number of rows of each."""
    from megatron_neobert.runtime.atomic_files import replacing

    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        with replacing(folder / f"{name}.parquet") as temporary:
            rows.to_parquet(str(temporary))
    return {str(name): len(rows) for name, rows in splits.items()}
