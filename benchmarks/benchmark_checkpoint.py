"""Measure how long training waits for a checkpoint, and what saving and loading cost each rank.

    python benchmarks/benchmark_checkpoint.py
    python benchmarks/benchmark_checkpoint.py --ranks 1 2 4 8

Trains one model for the same iterations in every round: without a checkpoint, with a synchronous one, and with an
asynchronous one (--async-save). "stands still" is the time in calls of the saver. "costs" is the extra time of the
round: on a CPU, writing also takes cores from the model. Verifying compares the sha256 of each file with the manifest,
as every start does.

With --ranks, one run per number of data-parallel ranks trains, saves and loads instead. Each rank counts seconds until
the checkpoint is complete or loaded, its peak memory, MiB of its files, MiB of the tensors that it reads, and MiB that
it hashes while loading.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from megatron_neobert.cli import Parser
from megatron_neobert.errors import run_command

PACKAGES = ("torch", "megatron-core")
MODES = ("none", "synchronous", "asynchronous")
DOCUMENTS = 2000  # of the generated corpus; any size does
VOCABULARY = 8192


def main() -> int:
    """Measure what saving a checkpoint costs, print a table with median seconds per mode, and return exit code 0."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--num-layers", type=int, default=6, help="layers of the model (%(default)s)")
    add("--hidden-size", type=int, default=384, help="width of the model (%(default)s); heads are 64 wide")
    add("--iterations", type=int, default=8, help="iterations per round (%(default)s); the 1st is followed by a save")
    add("--rounds", type=int, default=5, help="rounds per mode (%(default)s)")
    add("--folder", help="folder for the checkpoints; default: the system's temporary folder")
    add("--ranks", type=int, nargs="+", help="numbers of ranks: print a table of all ranks instead")
    options = parser.parse_args()
    if options.ranks:
        return _compare_ranks(options)
    from benchmarks.shared import describe_machine, in_turns, print_table

    with tempfile.TemporaryDirectory(dir=options.folder) as name, _run(Path(name), options) as run:
        _train(run, options.iterations, mode="none")  # warm-up
        rounds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for _, mode in in_turns(MODES, rounds=options.rounds):
            rounds[mode].append(_train(run, options.iterations, mode=mode))
        verify_seconds, size = _verify(run)
    for item in describe_machine(PACKAGES).items():
        print("{}: {}".format(*item))
    print(f"{size / 2**20:,.0f} MiB, {options.iterations} iterations, medians of {options.rounds} rounds")
    medians = {mode: [statistics.median(column) for column in zip(*rounds[mode], strict=True)] for mode in MODES}
    print_table(
        [
            {"checkpoint": mode, "seconds": seconds, "stands still": saving, "costs": seconds - medians["none"][0]}
            for mode, (seconds, saving) in medians.items()
        ]
    )
    print(f"verifying: {verify_seconds:.2f} s, {size / 2**20 / verify_seconds:,.0f} MiB/s")
    return 0


def _compare_ranks(options: argparse.Namespace) -> int:
    """Save and load on each number of ranks, and print a line per number: the medians of rounds, largest over ranks."""
    from torch import multiprocessing

    from benchmarks.shared import describe_machine, print_table
    from megatron_neobert.runtime.store import serve_store
    from megatron_neobert.text import parse_json

    lines = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        settings = _settings(Path(name), options, global_batch_size=2 * max(options.ranks))
        for ranks in options.ranks:
            store = serve_store("127.0.0.1", 0, nodes=ranks)
            os.environ.update(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
            figures = Path(name) / f"figures_{ranks}"
            figures.mkdir()
            run = settings.with_section("checkpoint", save=f"{name}/run_{ranks}", load=f"{name}/run_{ranks}")
            multiprocessing.start_processes(
                _measure_rank, args=(run, options.rounds, figures), nprocs=ranks, start_method="spawn"
            )
            results = [parse_json(path.read_text()) for path in figures.iterdir()]
            lines.append({"ranks": ranks} | {key: max(result[key] for result in results) for key in results[0]})
            shutil.rmtree(Path(name) / f"run_{ranks}")
    for item in describe_machine(PACKAGES).items():
        print("{}: {}".format(*item))
    print_table(lines)
    return 0


def _measure_rank(rank: int, settings: Any, rounds: int, figures: Path) -> None:
    """Train one iteration, save and load, `rounds` times, and write this rank's figures to a file."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    from megatron_neobert.checkpoint import folder as files
    from megatron_neobert.checkpoint.contents import StoredTensors
    from megatron_neobert.checkpoint.load import find_checkpoint, load_from
    from megatron_neobert.checkpoint.save import Saver
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join
    from megatron_neobert.training.step import train_step

    counts = {"read": 0, "hashed": 0}
    read, sha256_of = StoredTensors.read, files.sha256_of

    def read_and_count(self: Any, name: str, into: Any, **options: Any) -> None:
        counts["read"] += into.numel() * into.element_size()
        read(self, name, into, **options)

    def hash_and_count(path: Path) -> str:
        counts["hashed"] += path.stat().st_size
        return sha256_of(path)

    run = build_run(settings, *join(settings))
    saver, steps = Saver(run, log=lambda text: None), run.training_stream.steps()
    rows = []
    for _ in range(rounds):
        row: dict[str, float] = {}
        with _measured(row, "train"):
            train_step(run, next(steps))
        run.state = replace(run.state, iteration=run.state.iteration + 1)
        with _measured(row, "save"):
            saver.save()
        checkpoint = files.latest_checkpoint(Path(settings.checkpoint.save))
        row["written MiB"] = sum(path.stat().st_size for path in checkpoint.glob(f"rank_{rank:05d}*")) / 2**20
        counts.update(read=0, hashed=0)
        with (
            patch.object(StoredTensors, "read", read_and_count),
            patch.object(files, "sha256_of", hash_and_count),
            _measured(row, "load"),
        ):
            found = find_checkpoint(settings)
            assert found is not None
            load_from(run, found.folder)
        rows.append(row | {f"{name} MiB": count / 2**20 for name, count in counts.items()})
    result = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    (figures / str(rank)).write_text(json.dumps(result))
    distributed.shut_down()


@contextmanager
def _measured(row: dict[str, float], name: str) -> Iterator[None]:
    """Add seconds and peak memory of the block to `row`."""
    import torch

    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    started = time.perf_counter()
    yield
    row[f"{name} s"] = time.perf_counter() - started
    status = Path("/proc/self/status").read_text()
    row[f"{name} peak MiB"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024


@contextmanager
def _run(folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    """Write a corpus to `folder` and yield a `state.Run` of one rank. End the process group unless the block raises."""
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join

    settings = _settings(folder, options, global_batch_size=4)
    yield build_run(settings, *join(settings))
    distributed.shut_down()


def _settings(folder: Path, options: argparse.Namespace, *, global_batch_size: int) -> Any:
    """Write a corpus to a folder, and return the settings of a run on it."""
    from benchmarks.shared import write_corpus
    from megatron_neobert.config.schema import CheckpointConfig, DataConfig, ModelConfig, Settings, TrainingConfig

    corpus, vocabulary = write_corpus(
        folder, documents=DOCUMENTS, median_tokens=100, longest=500, vocab_size=VOCABULARY
    )
    return Settings(
        model=ModelConfig(
            num_layers=options.num_layers,
            hidden_size=options.hidden_size,
            num_attention_heads=options.hidden_size // 64,
        ),
        data=DataConfig(data_path=(corpus,), tokenizer_model=vocabulary, seq_length=512, num_workers=0),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=global_batch_size, eval_iters=0),
        checkpoint=CheckpointConfig(save=str(folder / "run"), keep_last=2),
    )


def _train(run: Any, iterations: int, *, mode: str) -> tuple[float, float]:
    """Train `run` further. Write one checkpoint, after the first iteration, unless `mode`, an item of MODES, is "none".

    Returns:
        Wall seconds until all iterations and the checkpoint have ended, and wall seconds in calls of the saver.
    """
    from megatron_neobert.checkpoint.save import Saver
    from megatron_neobert.training.step import train_step

    run.settings = run.settings.with_section("checkpoint", async_save=mode == "asynchronous")
    saver, steps = Saver(run, log=lambda text: None), run.training_stream.steps()
    started, saving_seconds = time.perf_counter(), 0.0
    for number in range(iterations):
        train_step(run, next(steps))
        run.state = replace(run.state, iteration=run.state.iteration + 1)
        trained = time.perf_counter()
        if number == 0 and mode != "none":
            saver.save()
        if not saver.is_writing or number == iterations - 1:
            saver.finish()
        saving_seconds += time.perf_counter() - trained
    return time.perf_counter() - started, saving_seconds


def _verify(run: Any) -> tuple[float, int]:
    """Verify the newest checkpoint; return the wall seconds and its bytes. Raise CheckpointError if it is damaged."""
    from megatron_neobert.checkpoint.folder import latest_checkpoint, verify_files

    checkpoint = latest_checkpoint(Path(run.settings.checkpoint.save))
    started = time.perf_counter()
    verify_files(checkpoint)
    seconds = time.perf_counter() - started
    return seconds, sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


if __name__ == "__main__":
    run_command(main)
