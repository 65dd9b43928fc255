"""A running phase of tools/accept_gpu.py: its commands, the sizes of its models and runs, and its results."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_neobert.runtime.executors import deferred
from megatron_neobert.text import parse_json

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS_PER_PHASE = 600  # timeout, so that a phase that hangs does not block the others

Curve = dict[int, dict[str, Any]]  # iteration -> line of metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of models, batches and runs for one kind of device."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    seq_length: int
    batch: int  # packed sequences in the global batch of a run
    iterations: int  # length of a run in the FP8 phase
    lengths: tuple[int, ...]  # sequence lengths of the benchmark; the profile uses the second
    tokens: int  # micro-batch of the benchmark; a step has two micro-batches
    corpus_megabytes: float

    @property
    def model(self) -> tuple[object, ...]:
        return "--num-layers", self.layers, "--hidden-size", self.hidden, "--num-attention-heads", self.heads


SIZES = {
    "cuda": Sizes(layers=28, hidden=768, heads=12, vocab_size=30_522, seq_length=1024, batch=32, iterations=300,
                  lengths=(512, 1024, 2048, 4096, 8192), tokens=65_536, corpus_megabytes=60),
    "cpu": Sizes(layers=2, hidden=64, heads=2, vocab_size=1000, seq_length=64, batch=4, iterations=20,
                 lengths=(64, 128), tokens=256, corpus_megabytes=0.3),
}  # fmt: skip


class Failed(Exception):
    """A check of a phase failed; the message says why."""


@dataclass
class Phase:
    """A running phase and its results; a phase with problems has failed."""

    name: str
    output: Path
    device: str  # "cuda" or "cpu"
    problems: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # title -> rows
    commands: list[str] = field(default_factory=list)
    ends: float = field(default_factory=lambda: time.monotonic() + SECONDS_PER_PHASE)  # time.monotonic()

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.device]

    @property
    def precision(self) -> tuple[str, ...]:
        return ("--bf16",) if self.device == "cuda" else ()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Record a `Failed` error in the block as a problem of the phase, and continue with the phase's next case."""
        try:
            yield
        except Failed as error:
            self.problems.append(f"{name}: {error}")

    def run(self, name: str, *arguments: object, device: str = "") -> str:
        """Run Python, or bash if the first argument is a shell script. Return stdout and stderr as one text.

        Output is also written to a log in logs/, whose name contains `name`. `device` "cpu" hides the GPU; "" means the
        phase's device. Raise Failed if the exit code is not 0, or if the command exceeds the phase's time limit.
        """
        command = ["bash" if str(arguments[0]).endswith(".sh") else sys.executable, *map(str, arguments)]
        self.commands.append(" ".join(command))
        log = self.output / "logs" / f"{self.name}_{re.sub('[^a-z0-9]+', '_', name.lower())}.txt"
        log.parent.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHON": sys.executable, "NPROC_PER_NODE": "1", "PYTHONUNBUFFERED": "1"}
        if (device or self.device) == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        process: subprocess.Popen[bytes] | None = None
        with log.open("w", encoding="utf-8") as stream:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
            options |= {"cwd": REPOSITORY, "env": environment, "start_new_session": True}
            try:
                with deferred((signal.SIGINT, signal.SIGTERM)):  # one in the middle would leave the process running
                    process = subprocess.Popen(command, **options)
                code = process.wait(max(1.0, self.ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(f"not finished within the {SECONDS_PER_PHASE} s of the phase; see {log}") from None
            finally:
                if process is not None and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        printed = log.read_text(encoding="utf-8", errors="replace")
        if code:
            lines = [line.strip() for line in printed.splitlines() if line.strip()] or ["no output"]
            errors = [line for line in lines if re.match(r"error\b|problem\b|FAILED |NOT as expected", line)]
            raise Failed(f"exit code {code}: {(errors or lines)[-1][:300]}; see {log}")
        return printed

    def benchmark(self, name: str, *flags: str, lengths: tuple[int, ...]) -> dict[str, Any]:
        """Run benchmarks/benchmark_step.py with these flags on packed steps, and return the figures that it writes."""
        figures, sizes = self.output / "figures.json", self.sizes
        batches = ("--micro-batch-tokens", sizes.tokens, "--global-batch-tokens", 2 * sizes.tokens)
        model = (*sizes.model, "--vocab-size", sizes.vocab_size, *self.precision)
        command = ("benchmarks/benchmark_step.py", *model, *batches, "--layouts", "packed", "--seq-length", *lengths)
        self.run(name, *command, "--output", figures, *flags)
        return dict(parse_json(figures.read_text(encoding="utf-8")))

    def train(self, name: str, iterations: int, *flags: object, bf16: bool = True, device: str = "") -> Curve:
        """Train or resume the run in runs/NAME to `iterations`. Return iteration -> metrics. A CPU ignores `bf16`."""
        corpus, tokenizer = self.prepare_corpus()
        folder, sizes = self.output / "runs" / name, self.sizes
        data = ("--data-path", corpus, "--tokenizer-model", tokenizer, "--seq-length", sizes.seq_length)
        rate = ("--lr", 6e-4, "--lr-warmup-iters", iterations // 10, "--lr-decay-style", "constant")
        batch = ("--micro-batch-size", sizes.batch, "--global-batch-size", sizes.batch)
        length = ("--train-iters", iterations, "--eval-iters", 0)
        start = ("examples/pretrain_neobert.sh", *sizes.model, *(self.precision if bf16 else ()))
        self.run(name, *start, *data, *rate, *batch, *length, "--save", folder, "--load", folder, *flags, device=device)
        lines = map(parse_json, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return {line["iteration"]: line for line in lines if "loss" in line}

    def remove_runs(self, *names: str) -> None:
        """Remove these runs, if an earlier, interrupted call has started them."""
        for name in names:
            shutil.rmtree(self.output / "runs" / name, ignore_errors=True)

    def move_checkpoint(self, run: str, iteration: int, *, to: str) -> None:
        """Move a checkpoint of `run` to the new run `to`, and delete the other checkpoints of `run` (3 GB each)."""
        name, target = f"iter_{iteration:07d}", self.output / "runs" / to
        target.mkdir(parents=True)
        (self.output / "runs" / run / name).rename(target / name)
        self.drop_checkpoints(run)

    def drop_checkpoints(self, run: str = "*") -> None:
        """Delete the checkpoints of `run`, or of all runs by default. Metrics are kept."""
        for folder in self.output.glob(f"runs/{run}/iter_*"):
            shutil.rmtree(folder)

    def prepare_corpus(self) -> tuple[Path, Path]:
        """Return the sample corpus's prefix and the tokenizer's folder. Write both unless the corpus is complete."""
        folder = self.output / "corpus"
        corpus, tokenizer, texts = folder / "sample_content_document", folder / "tokenizer", folder / "texts"
        if not corpus.with_suffix(".json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            size = ("--megabytes", self.sizes.corpus_megabytes)
            self.run("corpus", "-m", "megatron_neobert", "sample-corpus", "--output", texts, *size)
            documents = ("--input", texts / "*.parquet")
            vocabulary = ("--output", tokenizer, "--vocab-size", self.sizes.vocab_size)
            self.run("tokenizer", "-m", "megatron_neobert", "train-tokenizer", *documents, *vocabulary)
            target = ("--output-prefix", folder / "sample", "--tokenizer-model", tokenizer)
            workers = ("--workers", min(8, len(os.sched_getaffinity(0))))
            self.run("documents", "-m", "megatron_neobert", "preprocess", *documents, *target, *workers)
        return corpus, tokenizer


def relative_gaps(first: Curve, second: Curve, iterations: range) -> list[float]:
    """Return the absolute differences between two runs' losses at these iterations, relative to the first run.

    Raise Failed if a loss is missing at one of the iterations.
    """
    if missing := [number for number in iterations if number not in first or number not in second]:
        raise Failed(f"one of two runs has no loss at iterations {missing}")
    return [abs(second[number]["loss"] / first[number]["loss"] - 1) for number in iterations]


def expect_small(gaps: list[float], limit: float, message: str) -> None:
    """Raise Failed, whose text begins with `message`, if the largest gap exceeds `limit`, or if a gap is NaN."""
    if not max(gaps) <= limit:
        raise Failed(f"{message} by {max(gaps):.2g}, more than {limit:g}")
