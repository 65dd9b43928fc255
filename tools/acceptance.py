"""The phases of tools/accept_gpu.py: each starts commands of this project and compares their figures with limits.

The docstring of a phase is printed when it starts. A phase fills `tables`, and may raise Failed.
"""

import json
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
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from megatron_neobert.runtime.executors import deferred
from megatron_neobert.text import parse_json

REPOSITORY = Path(__file__).resolve().parents[1]
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


# --- the phases


# Limits of relative differences between losses, with the values of one H200 (docs/performance.md).
# FP8 against bf16 in the second half of a run: 1.4e-2 at most after 100 iterations. Two runs in bf16 differ by 4e-3.
FP8_LOSS = 3e-2
# The same step in bf16 with another kernel: 8e-6.
KERNEL_LOSS = 1e-3
# A resumed run on a GPU, where attention sums gradients in any order: 7.5e-5. On a CPU the losses must be equal.
RESUMED_LOSS = 1e-3
# CPU against GPU in fp32: 6.8e-8.
MOVED_LOSS = 1e-5
# Evaluations on a GPU and on a CPU. In fp32 and without dropout, both take the same steps up to rounding, so a few of
# 100 rows may change class.
SCORE, RELATIVE_PERPLEXITY = 0.03, 1e-4

LOCAL = ("--transformer-impl", "local")
ENGINE = ("--transformer-impl", "transformer_engine")
KERNELS = {
    "local layers": LOCAL,
    "Transformer Engine": ENGINE,
    "Transformer Engine, FlashAttention": (*ENGINE, "--attention-backend", "flash"),
    "Transformer Engine, cuDNN": (*ENGINE, "--attention-backend", "fused"),
}
FP8 = (*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe")
RUNS = {"bf16": ENGINE, "bf16 again": ENGINE, **{name: (*FP8, name) for name in ("tensorwise", "delayed", "blockwise")}}
# A forward and backward pass of Transformer Engine alone, which fails if its build does not match torch or the driver.
ENGINE_TEST = """import torch, transformer_engine.pytorch as te
layer = te.LayerNormLinear(768, 768, params_dtype=torch.bfloat16, device="cuda")
layer(torch.randn(128, 768, dtype=torch.bfloat16, device="cuda")).sum().backward()
assert layer.weight.grad.isfinite().all()"""
# The model and the data of the evaluations.
SHAPE = ("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 2)
TRAINING, VALIDATION = 400, 100  # rows
PAIRS = "training: {steps: 20, batch_size: 16, learning_rate: 1.0e-3, max_length: 64, save_interval: 20}\n"


def check_environment(phase: Phase) -> None:
    """Check the machine's packages, kernels and disk."""
    phase.run("check", "-m", "megatron_neobert", "check", "environment", "--save", phase.output)


def check_first_step(phase: Phase) -> None:
    """Train three iterations with local layers and, on a GPU, with Transformer Engine's.

    Every loss and gradient norm must be finite.
    """
    layers = {"local layers": LOCAL}
    if phase.device == "cuda":
        layers["Transformer Engine"] = ENGINE
        with phase.case("Transformer Engine alone"):
            phase.run("engine", "-c", ENGINE_TEST)
    rows = phase.tables.setdefault("first steps", [])
    for name, flags in layers.items():
        with phase.case(name):
            phase.remove_runs(name)
            curve = phase.train(name, 3, "--log-interval", 1, *flags)
            columns = ("iteration", "loss", "grad_norm")
            rows += [{"layers": name, **{column: line[column] for column in columns}} for line in curve.values()]
            if len(curve) < 3 or not all(isfinite(line["loss"] + line["grad_norm"]) for line in curve.values()):
                raise Failed("a loss or a gradient norm is not finite, or an update was skipped")


def check_kernels(phase: Phase) -> None:
    """Run tests/gpu. The phase fails if a test fails, or if none passes."""
    printed = phase.run("tests", "-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider")
    counts = {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|skipped)", printed)}
    phase.tables["tests/gpu"] = [counts]
    if not counts.get("passed"):
        raise Failed("no test passed")


def check_parity(phase: Phase) -> None:
    """Compare logits, loss and gradients with plain PyTorch in fp32 on the CPU, with `neobert check parity --step`."""
    figures = phase.output / "parity.json"
    flags = (*phase.sizes.model, "--vocab-size", phase.sizes.vocab_size, "--json", figures)
    phase.run("parity", "-m", "megatron_neobert", "check", "parity", "--step", *flags)
    parity = parse_json(figures.read_text(encoding="utf-8"))
    logits = parity["Megatron model, packed"]
    phase.tables["logits in fp32"] = [{name: logits[name] for name in ("tokens", "relative", "argmax_agreement")}]
    phase.tables["a step"] = [
        {"kernels": name, "loss, relative": gap["loss"], "1 - cosine": gap["gradient"], "furthest": gap["tensor"]}
        for name, gap in parity["step"].items()
    ]


def measure_speed(phase: Phase) -> None:
    """Measure steps of several lengths with each attention kernel. First losses must agree within KERNEL_LOSS."""
    rows, first_loss = phase.tables.setdefault("steps", []), None
    for name, flags in KERNELS.items() if phase.device == "cuda" else [("local layers", LOCAL)]:
        if "flash" in flags and find_spec("flash_attn") is None:
            continue
        with phase.case(name):
            figures = phase.benchmark(name, *flags, lengths=phase.sizes.lengths)
            columns = ("row", "tokens/s", "TFLOP/s", "% MFU", "peak GiB")
            kernels = {"kernels": name, "attention": figures["attention"]}
            rows += [{**kernels, **{column: row[column] for column in columns}} for row in figures["table"]]
            loss = figures["steps"][0]["loss"]  # all kernels compute the same documents, masks and weights
            first_loss = first_loss or loss
            expect_small([abs(loss / first_loss - 1)], KERNEL_LOSS, "loss differs from that of the first kernels")


def compare_fp8(phase: Phase) -> None:
    """Train in bf16, again in bf16, and in FP8, on the same data with the same seed.

    The second run in bf16 shows the noise. A run fails if, in the second half, its losses differ from the first run's
    by more than FP8_LOSS. In the first half, losses fall too fast to be compared.
    """
    total, rows = phase.sizes.iterations, phase.tables.setdefault("runs", [])
    bf16: Curve = {}
    for name, flags in RUNS.items():
        with phase.case(name):
            phase.remove_runs(name)
            curve = phase.train(name, total, "--log-interval", 10, "--save-interval", total, *flags)
            phase.drop_checkpoints(name)
            bf16 = bf16 or curve
            gaps = relative_gaps(bf16, curve, range(total // 2, total + 1, 10))
            # The median without the first interval, which includes compilation.
            speed = sorted(line["tokens_per_second"] for line in list(curve.values())[1:])[(len(curve) - 1) // 2]
            rows.append({"run": name, "last loss": curve[total]["loss"], "largest gap": max(gaps), "tokens/s": speed})
            expect_small(gaps, FP8_LOSS, "losses differ from those in bf16")


def check_resume(phase: Phase) -> None:
    """Train 20 iterations, then resume from the asynchronous checkpoint of iteration 10, on the same documents.

    Losses must be equal on a CPU, and agree within RESUMED_LOSS on a GPU.
    """
    phase.remove_runs("whole", "resumed")
    every = ("--log-interval", 1, "--save-interval", 10, "--async-save")
    whole = phase.train("whole", 20, *every)
    phase.move_checkpoint("whole", 10, to="resumed")
    resumed = phase.train("resumed", 20, *every)
    gaps = relative_gaps(whole, resumed, range(11, 21))
    phase.tables["losses after resuming"] = [
        {"iterations": len(gaps), "bit for bit": gaps.count(0.0), "largest gap": max(gaps)}
    ]
    if others := [number for number in range(11, 21) if whole[number]["cursor"] != resumed[number]["cursor"]]:
        raise Failed(f"iteration {others[0]} read other documents than in the uninterrupted run")
    expect_small(gaps, RESUMED_LOSS if phase.device == "cuda" else 0.0, "losses after resuming differ")


def check_move(phase: Phase) -> None:
    """Train in fp32 on the GPU, resume on the CPU, then on the GPU again. Losses must agree within MOVED_LOSS."""
    phase.remove_runs("here", "on_cpu", "back")
    flags = ("--micro-batch-size", 2, "--global-batch-size", 2, "--log-interval", 1, "--save-interval", 2)
    here = phase.train("here", 6, *flags, bf16=False)
    phase.move_checkpoint("here", 2, to="on_cpu")
    on_cpu = phase.train("on_cpu", 4, *flags, bf16=False, device="cpu")
    phase.move_checkpoint("on_cpu", 4, to="back")
    back = phase.train("back", 6, *flags, bf16=False)
    cpu_gaps, back_gaps = relative_gaps(here, on_cpu, range(3, 5)), relative_gaps(here, back, range(5, 7))
    phase.tables["largest gaps of the losses"] = [{"on the CPU": max(cpu_gaps), "back": max(back_gaps)}]
    expect_small(cpu_gaps + back_gaps, MOVED_LOSS, "losses on the CPU or after it differ")


def profile_step(phase: Phase) -> None:
    """Profile a step: list operations by time. The host must wait for the GPU exactly once per step."""
    for name in ("local layers", "Transformer Engine") if phase.device == "cuda" else ("local layers",):
        with phase.case(name):
            figures = phase.benchmark(name, *KERNELS[name], "--profile", lengths=phase.sizes.lengths[1:2])
            phase.tables[name], waits = figures["profile"], figures["waits"]
            if waits is not None:
                if not any(row["ms"] for row in figures["profile"]):
                    raise Failed("torch's profiler recorded no kernel")
                if sum(waits.values()) != 1:
                    raise Failed(f"the host waits {sum(waits.values())} times per step instead of once: {waits}")


# --- the phase `evaluate`


def check_evaluations(phase: Phase) -> None:
    """Train, convert, verify and evaluate a small model. Scores with and without the GPU must agree within limits."""
    folder, corpus = phase.output / "evaluations", phase.prepare_corpus()[0]
    shutil.rmtree(folder, ignore_errors=True)
    phase.remove_runs("small")
    phase.train("small", 20, *SHAPE, "--max-position-embeddings", 64, "--seq-length", 64, bf16=False)
    models = [folder / "eurobert", folder / "neobert"]
    for model in models:
        command = ("convert", "megatron-to-hf", "--load", phase.output / "runs" / "small", "--format", model.name)
        phase.run(f"convert {model.name}", "-m", "megatron_neobert", *command, "--output", model)
    phase.run("verify", "-m", "megatron_neobert", "verify", *models)
    data = write_data(folder / "data", corpus.parent / "texts")
    here, on_cpu = (evaluate(phase, models[0], data, folder / name, name) for name in ("here", "cpu"))
    rows = phase.tables.setdefault("scores", [])
    for name, score in here.items():
        gap, limit = abs(score - on_cpu[name]), SCORE
        if name == "pseudo-perplexity":
            gap, limit = gap / on_cpu[name], RELATIVE_PERPLEXITY
        rows.append({"evaluation": name, "here": score, "on the CPU": on_cpu[name], "difference": gap})
        with phase.case(name):
            expect_small([gap], limit, "the score differs from that on the CPU")


def evaluate(phase: Phase, model: Path, data: Path, output: Path, device: str) -> dict[str, float]:
    """Run the evaluations and return name -> score. `device` is "cpu" to hide the GPU, or "here"."""
    tuning = ("--batch-size", 16, "--learning-rate", 1e-3, "--weight-decay", 0.01, "--epochs", 2, "--max-length", 64)
    commands: dict[str, tuple[object, ...]] = {
        "glue": ("evaluate", "glue", "--data-dir", data, "--tasks", "cola", "rte", "--no-transfer", *tuning),
        "classify": ("evaluate", "classify", "--data-dir", data / "classify", *tuning),
        "pseudo_perplexity": ("evaluate", "ppl", "--data", data / "texts.jsonl", "--positions-per-doc", 8),
        "throughput": ("evaluate", "throughput", "--lengths", 64, "--batch-sizes", 1, 16, "--steps", 5),
        "contrastive": ("train-embedder", "--config", data / "pairs.yaml", "--data-dir", data / "pairs"),
    }
    results: dict[str, dict[str, Any]] = {}
    for kind, command in commands.items():
        flags = ("--model", model, "--output", output, "--dtype", "float32")
        phase.run(f"{kind} {device}", "-m", "megatron_neobert", *command, *flags, device=device.replace("here", ""))
        results[kind] = parse_json((output / model.name / f"{kind}.json").read_text(encoding="utf-8"))["results"]
    glue = {f"glue {task}": score["score"]["mean"] for task, score in results["glue"]["tasks"].items()}
    return glue | {
        "classify": results["classify"]["tasks"]["the"]["score"]["mean"],
        "pseudo-perplexity": results["pseudo_perplexity"]["pseudo_perplexity"],
        "retrieval after train-embedder": results["contrastive"]["validation_ndcg@10"][-1][1],
    }


def write_data(folder: Path, source: Path) -> Path:
    """Write the data of all evaluations, made from the sample corpus's texts, and return the folder.

    A sentence's label says whether the sentence contains "the". In a pair, the second text continues the first text.
    """
    import pyarrow.parquet

    texts = pyarrow.parquet.ParquetDataset(source).read(columns=["content"])["content"].to_pylist()
    passages = [words[at : at + 36] for words in map(str.split, texts) for at in range(0, len(words) - 35, 36)]
    if len(passages) < TRAINING + VALIDATION:
        raise Failed(f"the sample corpus has {len(passages)} passages of 36 words; {TRAINING + VALIDATION} are needed")
    splits = {"train": passages[:TRAINING], "validation": passages[TRAINING : TRAINING + VALIDATION]}
    for split, chosen in splits.items():
        firsts, rests = [" ".join(words[:12]) for words in chosen], [" ".join(words[12:]) for words in chosen]
        labels = [int("the" in first.lower().split()) for first in firsts]
        entailments = [("not_entailment", "entailment")[label] for label in labels]
        write_rows(folder / f"CoLA/{split}.jsonl", sentence=firsts, label=labels)
        write_rows(folder / f"RTE/{split}.jsonl", sentence1=firsts, sentence2=rests, label=entailments)
        write_rows(folder / f"classify/the/{split}.jsonl", text=firsts, label=[str(label) for label in labels])
        write_rows(folder / f"pairs/{'PAIRS' if split == 'train' else split}.jsonl", query=firsts, positive=rests)
    write_rows(folder / "texts.jsonl", content=[" ".join(words) for words in passages[:40]])
    (folder / "pairs.yaml").write_text(PAIRS, encoding="utf-8")
    return folder


def write_rows(path: Path, **columns: list[Any]) -> None:
    """Write a file of JSON lines from columns, and create the file's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# In the order of risk: what would stop every later phase comes first.
PHASES: dict[str, Callable[[Phase], None]] = {
    "environment": check_environment,
    "first-step": check_first_step,
    "resume": check_resume,
    "speed": measure_speed,
    "kernels": check_kernels,
    "parity": check_parity,
    "fp8": compare_fp8,
    "move": check_move,
    "profile": profile_step,
    "evaluate": check_evaluations,
}
NEEDS_CUDA = ("kernels", "fp8", "move")
