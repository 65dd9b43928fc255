"""The phases of tools/accept_gpu.py: each starts commands of this project and compares their figures with limits.

The docstring of a phase is printed when it starts. A phase fills `tables`, and may raise Failed.
"""

import json
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from megatron_neobert.text import parse_json
from tools.acceptance.phase import Curve, Failed, Phase, expect_small, relative_gaps

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
