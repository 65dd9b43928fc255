"""Measure how long training waits for a checkpoint, and how long verifying a checkpoint takes.

    python benchmarks/benchmark_checkpoint.py

One model, the same iterations in every round: without a checkpoint, with a synchronous one, and with an
asynchronous one (--async-save). The loop stands still while it calls the saver; what it loses beyond that are
the cores that the writing takes from a model on the CPU. Verifying is what every start does first: each file's sha256
against the manifest.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.cli import Parser
from megatron_neobert.errors import run_command

PACKAGES = ("torch", "megatron-core")
MODES = ("none", "synchronous", "asynchronous")
DOCUMENTS = 2000  # of a made-up corpus; what is in it does not matter here
VOCABULARY = 8192


def main() -> int:
    """Trains a few iterations in each mode, in turns, and prints the medians."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--num-layers", type=int, default=6, help="layers of the model")
    add("--hidden-size", type=int, default=384, help="width of the model; heads are 64 wide")
    add("--iterations", type=int, default=8, help="iterations per round; the checkpoint is after the 1st")
    add("--rounds", type=int, default=5, help="rounds per mode")
    add("--folder", help="where checkpoints are written; default: the system's temporary folder")
    options = parser.parse_args()
    from benchmarks.shared import describe_machine, in_turns, print_table

    with tempfile.TemporaryDirectory(dir=options.folder) as name, _run(Path(name), options) as run:
        _iterate(run, options.iterations, mode="none")  # what is paid only once
        rounds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for _, mode in in_turns(MODES, rounds=options.rounds):
            rounds[mode].append(_iterate(run, options.iterations, mode=mode))
        verify_seconds, size = _verify(run)
    for item in describe_machine(PACKAGES).items():
        print("{}: {}".format(*item))
    print(f"{size / 2**20:,.0f} MiB, {options.iterations} iterations, medians of {options.rounds} rounds")
    medians = {mode: [statistics.median(column) for column in zip(*rounds[mode], strict=True)] for mode in MODES}
    print_table(
        [
            {"checkpoint": mode, "seconds": seconds, "stands still": still, "costs": seconds - medians["none"][0]}
            for mode, (seconds, still) in medians.items()
        ]
    )
    print(f"verifying: {verify_seconds:.2f} s, {size / 2**20 / verify_seconds:,.0f} MiB/s")
    return 0


@contextmanager
def _run(folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    """A run of this process alone, without checkpoint."""
    from benchmarks.shared import write_corpus
    from megatron_neobert.config.schema import CheckpointConfig, DataConfig, ModelConfig, Settings, TrainingConfig
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join

    corpus, vocabulary = write_corpus(
        folder, documents=DOCUMENTS, median_tokens=100, longest=500, vocab_size=VOCABULARY
    )
    settings = Settings(
        model=ModelConfig(
            num_layers=options.num_layers,
            hidden_size=options.hidden_size,
            num_attention_heads=options.hidden_size // 64,
        ),
        data=DataConfig(data_path=(corpus,), tokenizer_model=vocabulary, seq_length=512, num_workers=0),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=4, eval_iters=0),
        checkpoint=CheckpointConfig(save=str(folder / "run"), keep_last=2),
    )
    yield build_run(settings, *join(settings))
    distributed.shut_down()


def _iterate(run: Any, iterations: int, *, mode: str) -> tuple[float, float]:
    """Seconds of some iterations, with a checkpoint after the first of them, and of the calls to the saver."""
    from megatron_neobert.checkpoint.save import Saver
    from megatron_neobert.training.step import train_step

    run.settings = run.settings.with_section("checkpoint", async_save=mode == "asynchronous")
    saver, steps = Saver(run, log=lambda text: None), run.training_stream.steps()
    started, still_seconds = time.perf_counter(), 0.0
    for number in range(iterations):
        train_step(run, next(steps))
        run.state = replace(run.state, iteration=run.state.iteration + 1)
        stopped = time.perf_counter()
        if number == 0 and mode != "none":
            saver.save()
        if not saver.is_writing or number == iterations - 1:
            saver.finish()
        still_seconds += time.perf_counter() - stopped
    return time.perf_counter() - started, still_seconds


def _verify(run: Any) -> tuple[float, int]:
    """Seconds, and bytes of the newest checkpoint."""
    from megatron_neobert.checkpoint.folder import latest_checkpoint, verify_files

    checkpoint = latest_checkpoint(Path(run.settings.checkpoint.save))
    started = time.perf_counter()
    verify_files(checkpoint)
    seconds = time.perf_counter() - started
    return seconds, sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


if __name__ == "__main__":
    run_command(main)
