"""Command: fetch the datasets of contrastive fine-tuning, on a machine with network.

    python tools/fetch_contrastive.py --config examples/contrastive.yaml --data-dir DIR [--datasets KEY...]

Writes DATA_DIR/KEY.parquet with the columns query, positive and negatives, whole or not at all; files that are there
are kept, so that the same command goes on. Copy the folder to where there is no network.
"""

import argparse
from pathlib import Path

from megatron_neobert.errors import ConfigError, OutputError, run_command


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
    from megatron_neobert.evaluation.contrastive.data import fetch_pairs
    from megatron_neobert.files import own_name

    try:
        arguments.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--data-dir {arguments.data_dir}: cannot be created ({error.strerror}).") from error
    for key in keys:
        path = arguments.data_dir / f"{key}.parquet"
        if path.exists():
            print(f"kept {path}")
            continue
        pairs, temporary = fetch_pairs(key, config.datasets[key]), own_name(path)
        try:
            pairs.to_parquet(str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        print(f"wrote {path}: {len(pairs):,} pairs from {config.datasets[key].hub}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fetch_contrastive.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="as for finetune_contrastive.py")
    parser.add_argument("--data-dir", required=True, type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument("--datasets", nargs="+", metavar="KEY", help="(default: all but those with default: false)")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
