"""The phase `evaluate`: evaluations of a small model, each on the phase's device and on the CPU."""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_neobert.text import parse_json
from tools.acceptance.phase import Failed, Phase, expect_small

# Largest differences between the two devices. In fp32 and without dropout, both take the same steps up to rounding, so
# a few of 100 rows may change class.
SCORE, RELATIVE_PERPLEXITY = 0.03, 1e-4
SHAPE = ("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 2)
TRAINING, VALIDATION = 400, 100  # rows
PAIRS = """training: {steps: 20, batch_size: 16, learning_rate: 1.0e-3, max_length: 64, save_interval: 20}
"""


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
