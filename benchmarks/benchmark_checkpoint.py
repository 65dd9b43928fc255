"""Measure how long training waits for a checkpoint, and how long verifying a checkpoint takes.

    python benchmarks/benchmark_checkpoint.py

Trains one model for the same iterations in every round: without a checkpoint, with a synchronous one, and with an
asynchronous one (--async-save). "stands still" is the time in calls of the saver. "costs" is the extra time of the
round: on a CPU, writing also takes cores from the model. Verifying compares the sha256 of each file with the manifest,
as every start does.
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
    options = parser.parse_args()
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


@contextmanager
def _run(folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    """Write a corpus to `folder` and yield a `state.Run` of one rank. End the process group unless the block raises."""
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
