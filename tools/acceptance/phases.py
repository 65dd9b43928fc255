"""The phases of tools/accept_gpu.py: which commands each starts, and the limits that their figures are held against."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_neobert.text import parse_json

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS_PER_PHASE = 600  # one that hangs must not keep the others from running

# Limits, relative. No GPU has run this yet: those that no CPU can show are expectations.
FP8_LOSS = 1e-2  # emulated on a CPU: 4.1e-4 after 50 iterations (docs/performance.md)
LOSS_OF_KERNELS = 1e-2  # of the same step with another kernel in bf16; emulated: 1.4e-4
RESUMED_LOSS = 1e-2  # on a GPU, whose attention adds gradients up in any order; on a CPU not a bit may differ
MOVED_LOSS = 1e-4  # fp32, CPU against GPU; other layouts of ranks show 1e-7

LOCAL = ("--transformer-impl", "local")
ENGINE = ("--transformer-impl", "transformer_engine")
KERNELS = {
    "local layers": LOCAL,
    "local layers, flash-attn": (*LOCAL, "--attention-backend", "flash"),
    "Transformer Engine": ENGINE,
    "Transformer Engine, cuDNN": (*ENGINE, "--attention-backend", "fused"),
}
FP8 = (*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe")
RUNS = {"bf16": ENGINE, "bf16 again": ENGINE, **{name: (*FP8, name) for name in ("tensorwise", "delayed", "blockwise")}}
# One forward and backward pass of Transformer Engine alone: a build that does not fit torch or the driver fails here.
ENGINE_ONCE = """import torch, transformer_engine.pytorch as te
layer = te.LayerNormLinear(768, 768, params_dtype=torch.bfloat16, device="cuda")
layer(torch.randn(128, 768, dtype=torch.bfloat16, device="cuda")).sum().backward()
assert layer.weight.grad.isfinite().all()"""

Curve = dict[int, dict[str, Any]]  # lines of a run's metrics.jsonl, by iteration


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the computed model, batches, lengths and durations."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int
    seq_length: int
    rows: int  # of a run's global batch
    iterations: int  # of a run whose losses are compared
    lengths: tuple[int, ...]  # of a benchmark's rows; the second is that of a single measurement
    tokens: int  # of a benchmark's micro-batch, two of which make a step
    corpus_megabytes: float

    @property
    def model(self) -> tuple[object, ...]:
        return "--num-layers", self.layers, "--hidden-size", self.hidden, "--num-attention-heads", self.heads


SIZES = {
    "cuda": Sizes(layers=28, hidden=768, heads=12, vocab_size=30_522, seq_length=1024, rows=32, iterations=300,
                  lengths=(512, 1024, 2048, 4096, 8192), tokens=65_536, corpus_megabytes=60),
    "cpu": Sizes(layers=2, hidden=64, heads=2, vocab_size=1000, seq_length=64, rows=4, iterations=20,
                 lengths=(64, 128), tokens=256, corpus_megabytes=0.3),
}  # fmt: skip


class Failed(Exception):
    """A sentence about what is not as it should be."""


@dataclass
class Phase:
    """One phase while it runs, and what it finds."""

    name: str
    output: Path
    device: str  # "cuda" or "cpu"
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    ends: float = field(default_factory=lambda: time.monotonic() + SECONDS_PER_PHASE)

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.device]

    @property
    def precision(self) -> tuple[str, ...]:
        return ("--bf16",) if self.device == "cuda" else ()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Turn a failure inside into one problem of the phase, after which the next case begins."""
        try:
            yield
        except Failed as problem:
            self.problems.append(f"{name}: {problem}")

    def run(self, name: str, *words: object, device: str = "") -> str:
        """Run a command of this project to its end, in what is left of the phase's time.

        Returns:
            Everything it printed, which is also in logs/PHASE_NAME.txt.

        Raises:
            Failed: With its error, or its last line.
        """
        command = ["bash" if str(words[0]).endswith(".sh") else sys.executable, *map(str, words)]
        self.commands.append(" ".join(command))
        log = self.output / "logs" / f"{self.name}_{re.sub('[^a-z0-9]+', '_', name.lower())}.txt"
        log.parent.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHON": sys.executable, "NPROC_PER_NODE": "1", "PYTHONUNBUFFERED": "1"}
        if (device or self.device) == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with log.open("w", encoding="utf-8") as stream:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
            # Signals are kept back until the process is known, so that none is left behind by one that comes meanwhile.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            options["preexec_fn"] = partial(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
            process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True, **options)
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                code = process.wait(max(1.0, self.ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(f"not finished when the phase's {SECONDS_PER_PHASE} s were over; see {log}") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        printed = log.read_text(encoding="utf-8", errors="replace")
        if code:
            lines = [line.strip() for line in printed.splitlines() if line.strip()] or ["it printed nothing"]
            telling = [line for line in lines if re.match(r"error\b|problem\b|FAILED |NOT as expected", line)]
            raise Failed(f"exit code {code}: {(telling or lines)[-1][:300]}; see {log}")
        return printed

    def benchmark(self, name: str, *flags: str, lengths: tuple[int, ...]) -> dict[str, Any]:
        """Return the figures of benchmarks/benchmark_step.py about packed steps."""
        figures, sizes = self.output / "figures.json", self.sizes
        batches = ("--micro-batch-tokens", sizes.tokens, "--global-batch-tokens", 2 * sizes.tokens)
        model = (*sizes.model, "--vocab-size", sizes.vocab_size, *self.precision)
        command = ("benchmarks/benchmark_step.py", *model, *batches, "--layouts", "packed", "--seq-length", *lengths)
        self.run(name, *command, "--output", figures, *flags)
        return dict(parse_json(figures.read_text(encoding="utf-8")))

    def train(self, name: str, iterations: int, *flags: object, bf16: bool = True, device: str = "") -> Curve:
        """Run training on the sample corpus into runs/NAME, resumed from what is there; return its record."""
        corpus, tokenizer = self.prepare_corpus()
        folder, sizes = self.output / "runs" / name, self.sizes
        data = ("--data-path", corpus, "--tokenizer-model", tokenizer, "--seq-length", sizes.seq_length)
        rate = ("--lr", 6e-4, "--lr-warmup-iters", iterations // 10, "--lr-decay-style", "constant")
        batch = ("--micro-batch-size", sizes.rows, "--global-batch-size", sizes.rows)
        length = ("--train-iters", iterations, "--eval-iters", 0)
        start = ("examples/pretrain_neobert.sh", *sizes.model, *(self.precision if bf16 else ()))
        self.run(name, *start, *data, *rate, *batch, *length, "--save", folder, "--load", folder, *flags, device=device)
        lines = map(parse_json, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return {line["iteration"]: line for line in lines if "loss" in line}

    def start_anew(self, *names: str) -> None:
        """Remove what an interrupted phase left of these runs."""
        for name in names:
            shutil.rmtree(self.output / "runs" / name, ignore_errors=True)

    def hand_over(self, run: str, iteration: int, *, to: str) -> None:
        """Make one checkpoint of a run what another begins with; the run's others go, 3 GB each at full size."""
        name, target = f"iter_{iteration:07d}", self.output / "runs" / to
        target.mkdir(parents=True)
        (self.output / "runs" / run / name).rename(target / name)
        self.drop_checkpoints(run)

    def drop_checkpoints(self, run: str = "*") -> None:
        """Remove the checkpoints of a run, or of all; the records of their losses stay."""
        for folder in self.output.glob(f"runs/{run}/iter_*"):
            shutil.rmtree(folder)

    def prepare_corpus(self) -> tuple[Path, Path]:
        """Make a corpus of the installed documentation, once; return its prefix and its tokenizer."""
        folder = self.output / "corpus"
        corpus, tokenizer, shards = folder / "sample_content_document", folder / "tokenizer", folder / "shards"
        if not corpus.with_suffix(".json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            size = ("--megabytes", self.sizes.corpus_megabytes)
            self.run("corpus", "-m", "megatron_neobert", "sample-corpus", "--output", shards, *size)
            documents = ("--input", shards / "*.parquet")
            vocabulary = ("--output", tokenizer, "--vocab-size", self.sizes.vocab_size)
            self.run("tokenizer", "-m", "megatron_neobert", "train-tokenizer", *documents, *vocabulary)
            target = ("--output-prefix", folder / "sample", "--tokenizer-model", tokenizer)
            workers = ("--workers", min(8, len(os.sched_getaffinity(0))))
            self.run("documents", "-m", "megatron_neobert", "preprocess", *documents, *target, *workers)
        return corpus, tokenizer


def gaps(one: Curve, other: Curve, iterations: range) -> list[float]:
    """Return the relative gaps between two runs' losses at these iterations.

    Raises:
        Failed: A run has no loss at one of them.
    """
    if missing := [number for number in iterations if number not in one or number not in other]:
        raise Failed(f"one of two runs has no loss at iterations {missing}")
    return [abs(other[number]["loss"] / one[number]["loss"] - 1) for number in iterations]


def expect(what: str, found: list[float], limit: float) -> None:
    """Raise Failed where a gap exceeds the limit."""
    if not max(found) <= limit:
        raise Failed(f"{what} by {max(found):.2g}, more than {limit:g}")


def check_environment(phase: Phase) -> None:
    """Packages, driver and limits of the machine; a product and a sum on the GPU."""
    flags = ("--gpu-test",) if phase.device == "cuda" else ()
    printed = phase.run("check", "-m", "megatron_neobert", "check", "environment", "--save", phase.output, *flags)
    phase.notes += re.findall(r"^(?:ok|warning) .*(?:\n {8}.*)*", printed, flags=re.MULTILINE)


def check_kernels(phase: Phase) -> None:
    """Transformer Engine alone, then tests/gpu."""
    with phase.case("Transformer Engine"):
        phase.run("engine", "-c", ENGINE_ONCE)
    with phase.case("tests/gpu"):
        printed = phase.run("tests", "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider")
        counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)", printed)}
        phase.tables["tests/gpu"] = [counts]
        phase.notes += re.findall(r"^SKIPPED [^\n]*", printed, flags=re.MULTILINE)
        if not counts.get("passed"):
            raise Failed("no test has passed")


def check_parity(phase: Phase) -> None:
    """Logits, loss and gradients against the plain model in fp32 on the CPU."""
    figures = phase.output / "parity.json"
    flags = (*phase.sizes.model, "--vocab-size", phase.sizes.vocab_size, "--json", figures)
    phase.run("parity", "-m", "megatron_neobert", "check", "parity", "--step", *flags)
    found = parse_json(figures.read_text(encoding="utf-8"))
    logits = found["Megatron model, packed"]
    phase.tables["logits in fp32"] = [{name: logits[name] for name in ("tokens", "relative", "argmax_agreement")}]
    phase.tables["a step"] = [
        {"kernels": name, "loss, relative": gap["loss"], "1 - cosine": gap["gradient"], "furthest": gap["tensor"]}
        for name, gap in found["step"].items()
    ]
    phase.notes += [f"{name}: {why}" for name, why in found["not run"].items()]


def measure_speed(phase: Phase) -> None:
    """Steps at several lengths with every attention and loss kernel."""
    rows, first_loss = phase.tables.setdefault("steps", []), None
    for name, flags in KERNELS.items() if phase.device == "cuda" else [("local layers", LOCAL)]:
        if "flash" in flags and find_spec("flash_attn") is None:
            phase.notes.append(f"{name}: not measured, flash-attn is not installed")
            continue
        with phase.case(name):
            figures = phase.benchmark(name, *flags, lengths=phase.sizes.lengths)
            columns = ("row", "tokens/s", "TFLOP/s", "% MFU", "peak GiB")
            taken = {"kernels": name, "attention": figures["attention"]}
            rows += [{**taken, **{column: row[column] for column in columns}} for row in figures["table"]]
            loss = figures["steps"][0]["loss"]  # of the same documents, masks and weights
            first_loss = first_loss or loss
            expect("its loss differs from that of the first kernels", [abs(loss / first_loss - 1)], LOSS_OF_KERNELS)


def compare_fp8(phase: Phase) -> None:
    """Runs in FP8 beside one in bf16, on the same data with the same seed; bf16 twice shows what is noise."""
    total, rows = phase.sizes.iterations, phase.tables.setdefault("runs", [])
    exact: Curve = {}
    for name, flags in RUNS.items():
        with phase.case(name):
            phase.start_anew(name)
            curve = phase.train(name, total, "--log-interval", 10, "--save-interval", total, *flags)
            phase.drop_checkpoints(name)
            exact = exact or curve
            found = gaps(exact, curve, range(10, total + 1, 10))
            # The first interval compiles: the median of the others.
            speed = sorted(line["tokens_per_second"] for line in list(curve.values())[1:])[(len(curve) - 1) // 2]
            rows.append({"run": name, "last loss": curve[total]["loss"], "largest gap": max(found), "tokens/s": speed})
            expect("its losses differ from those of bf16", found, FP8_LOSS)


def check_resume(phase: Phase) -> None:
    """A run of 20 iterations, and what becomes of its checkpoint after 10, which was written while it trained on."""
    phase.start_anew("whole", "resumed")
    every = ("--log-interval", 1, "--save-interval", 10, "--async-save")
    whole = phase.train("whole", 20, *every)
    phase.hand_over("whole", 10, to="resumed")
    resumed = phase.train("resumed", 20, *every)
    found = gaps(whole, resumed, range(11, 21))
    phase.tables["losses after resuming"] = [
        {"iterations": len(found), "bit for bit": found.count(0.0), "largest gap": max(found)}
    ]
    for number in range(11, 21):
        if whole[number]["cursor"] != resumed[number]["cursor"]:
            raise Failed(f"iteration {number} read other documents than in the run that was not stopped")
    expect("losses after resuming differ", found, RESUMED_LOSS if phase.device == "cuda" else 0.0)


def check_move(phase: Phase) -> None:
    """A checkpoint in fp32, trained on on the CPU, and from there on the GPU again."""
    phase.start_anew("here", "on_cpu", "back")
    small = ("--micro-batch-size", 2, "--global-batch-size", 2, "--log-interval", 1, "--save-interval", 2)
    here = phase.train("here", 6, *small, bf16=False)
    phase.hand_over("here", 2, to="on_cpu")
    on_cpu = phase.train("on_cpu", 4, *small, bf16=False, device="cpu")
    phase.hand_over("on_cpu", 4, to="back")
    back = phase.train("back", 6, *small, bf16=False)
    there, home = gaps(here, on_cpu, range(3, 5)), gaps(here, back, range(5, 7))
    phase.tables["largest gaps of the losses"] = [{"on the CPU": max(there), "back": max(home)}]
    expect("losses on the CPU or after it differ", there + home, MOVED_LOSS)


def profile_step(phase: Phase) -> None:
    """Places where the host waits for the GPU in a step, of which one is allowed, and the time of each operation."""
    for name in ("local layers", "Transformer Engine") if phase.device == "cuda" else ("local layers",):
        with phase.case(name):
            figures = phase.benchmark(name, *KERNELS[name], "--profile", lengths=phase.sizes.lengths[1:2])
            phase.tables[name], waits = figures["profile"], figures["waits"]
            if waits is not None:
                phase.notes.append(f"{name}: the host waits at {waits}")
                if sum(waits.values()) != 1:
                    raise Failed(f"the host waits {sum(waits.values())} times in a step, and once is enough: {waits}")


PHASES: dict[str, Callable[[Phase], None]] = {
    "environment": check_environment,
    "kernels": check_kernels,
    "parity": check_parity,
    "speed": measure_speed,
    "fp8": compare_fp8,
    "resume": check_resume,
    "move": check_move,
    "profile": profile_step,
}
CUDA_ALONE = ("kernels", "fp8", "move")
