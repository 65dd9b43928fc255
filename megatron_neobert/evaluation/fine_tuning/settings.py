"""What a fine-tuning is asked for: points of a grid, the protocol that they share, and the flags for both.

Source of the grids: arXiv 2502.19587 table 6; for the ablations section 4, which does not state their weight decay.
"""

import argparse
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_neobert.errors import CommandParser, ConfigError, positive
from megatron_neobert.runtime.atomic_files import require_folder


@dataclass(frozen=True, kw_only=True)
class Point:
    """Of the grid, with the seed of head, order and dropout."""

    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int

    @property
    def name(self) -> str:
        return f"batch{self.batch_size}_lr{self.learning_rate:g}_wd{self.weight_decay:g}_seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination is a point."""

    batch_sizes: tuple[int, ...]
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]

    def points(self, seeds: Sequence[int]) -> list[Point]:
        every = itertools.product(self.batch_sizes, self.learning_rates, self.weight_decays, seeds)
        return [
            Point(batch_size=batch, learning_rate=rate, weight_decay=decay, seed=seed)
            for batch, rate, decay, seed in every
        ]


GRIDS = {
    "paper": Grid(
        batch_sizes=(2, 4, 8, 16, 32),
        learning_rates=(5e-6, 6e-6, 8e-6, 1e-5, 2e-5, 3e-5),
        weight_decays=(1e-2, 1e-5),
    ),
    "small": Grid(batch_sizes=(16, 32), learning_rates=(1e-5, 2e-5, 3e-5), weight_decays=(1e-5,)),
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What every run of an evaluation has in common."""

    epochs: int = 10
    patience: int = 15  # evaluations
    max_length: int = 1024  # tokens
    limit: int | None = None  # rows of every split
    dtype: str = "float32"  # of the forward and backward passes; weights and moments stay float32
    attention: str | None = None
    device: str = "cpu"


def add_flags(parser: CommandParser) -> None:
    """Model, data and output, those that replace values of a grid, and those of the protocol."""
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="Hugging Face folder of an encoder")
    add("--data-dir", required=True, type=Path, metavar="DIR", help="a folder per task, of text files or parquet")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for the results")
    add("--batch-size", nargs="+", type=positive, metavar="N", help="replaces the grid's")
    add("--learning-rate", nargs="+", type=float, metavar="X", help="replaces the grid's")
    add("--weight-decay", nargs="+", type=float, metavar="X", help="replaces the grid's")
    add("--seeds", nargs="+", type=int, default=[0], metavar="N", help="default: 0")
    add("--epochs", type=positive, default=10, help="at most (default: %(default)s)")
    add(
        "--max-length",
        type=positive,
        default=1024,
        metavar="N",
        help="cut inputs after N tokens (default: %(default)s)",
    )
    add("--limit", type=positive, metavar="N", help="only N rows of every split, for a quick look")
    add("--jobs", type=positive, default=1, metavar="N", help="runs at a time, on one GPU each (default: 1)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the passes; weights stay float32; the paper's code took float16 (default: %(default)s)",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--attention", metavar="NAME", help="eager, sdpa, flash_attention_2 (default: transformers')")


def check_flags(arguments: argparse.Namespace, *, remedy: str) -> None:
    """Looks at values and folders; `remedy` is where the data come from.

    Raises:
        ConfigError: A value of the grid or a seed is below 0.
        MissingInputError: There is no such folder.
    """
    for name in ("learning_rate", "weight_decay", "seeds"):
        if (values := getattr(arguments, name)) and min(values) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {min(values)} is below 0.")
    require_folder("--data-dir", arguments.data_dir, remedy=remedy)
    require_folder("--model", arguments.model, holding="config.json")


def given_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of Grid that flags replace."""
    flags = {"batch_sizes": "batch_size", "learning_rates": "learning_rate", "weight_decays": "weight_decay"}
    return {field: tuple(values) for field, flag in flags.items() if (values := getattr(arguments, flag))}


def given_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of FineTuning.

    Raises:
        ConfigError: The device is not there, or cannot compute in --dtype.
    """
    same = {name: getattr(arguments, name) for name in ("model", "data_dir", "output", "jobs")}
    return {**same, "seeds": tuple(dict.fromkeys(arguments.seeds)), "protocol": build_protocol(arguments)}


def build_protocol(arguments: argparse.Namespace) -> Protocol:
    """Of the flags, on the device that there is.

    Raises:
        ConfigError: That device is not there, or cannot compute in --dtype.
    """
    gpus = visible_gpus()  # choose_device would start CUDA, and one GPU could not be picked any more
    if arguments.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: torch sees no GPU here; give cpu, or run where there is one.")
    device = arguments.device or ("cuda" if gpus else "cpu")
    if arguments.dtype == "float16" and device == "cpu":
        raise ConfigError("--dtype float16 needs a GPU; on a CPU take float32 or bfloat16.")
    return Protocol(
        epochs=arguments.epochs,
        max_length=arguments.max_length,
        limit=arguments.limit,
        dtype=arguments.dtype,
        attention=arguments.attention,
        device=device,
    )


def visible_gpus() -> list[str]:
    """The names of this process's GPUs, as CUDA_VISIBLE_DEVICES takes them; does not start CUDA."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ([str(number) for number in range(count)] if named is None else named.split(","))[:count]
