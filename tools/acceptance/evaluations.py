"""The phase `evaluate`: evaluations of a small model, each on the phase's device and on the CPU."""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_neobert.text import parse_json
from tools.acceptance.phase import Failed, Phase, expect_small

# In fp32 and without dropout, both devices take the same steps up to rounding, so a few of 100 rows may change class.
# TOLERANCES[kind] is the largest difference between the scores of the two devices.
TOLERANCES = {"glue": 0.03, "classify": 0.03, "contrastive": 0.03, "pseudo_perplexity, relative": 1e-4}
SHAPE = ("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 2)
ROWS = {"train": 400, "validation": 100}
PAIRS = """training: {steps: 20, batch_size: 16, learning_rate: 1.0e-3, max_length: 64, save_interval: 20}
"""


def check_evaluations(phase: Phase) -> None:
    """Convert, verify and evaluate a small model, with and without the GPU. Scores must agree within TOLERANCES."""
    folder, corpus = phase.output / "evaluations", phase.prepare_corpus()[0]
    shutil.rmtree(folder, ignore_errors=True)
    phase.remove_runs("small")
    phase.train("small", 20, *SHAPE, "--max-position-embeddings", 64, "--seq-length", 64, bf16=False)
    models = [folder / "eurobert", folder / "neobert"]
    for model in models:
        command = ("convert", "megatron-to-hf", "--load", phase.output / "runs" / "small", "--format", model.name)
        phase.run(f"convert {model.name}", "-m", "megatron_neobert", *command, "--output", model)
    phase.run("verify", "-m", "megatron_neobert", "verify", *models)
    data = write_data(folder / "data", corpus.parent / "shards")
    scores = {name: evaluate(phase, models[0], data, folder / name, name) for name in ("here", "cpu")}
    rows = phase.tables.setdefault("scores", [])
    for name, (kind, score) in scores["here"].items():
        on_cpu = scores["cpu"][name][1]
        gap = abs(score / on_cpu - 1) if "relative" in kind else abs(score - on_cpu)
        rows.append({"evaluation": name, "here": score, "on the CPU": on_cpu, "difference": gap})
        with phase.case(name):
            expect_small([gap], TOLERANCES[kind], "the score differs from that on the CPU")


def evaluate(phase: Phase, model: Path, data: Path, output: Path, device: str) -> dict[str, tuple[str, float]]:
    """Run the evaluations and return name -> (key of TOLERANCES, score). `device` "cpu" hides the GPU."""
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
    scores = {f"glue {task}": ("glue", results["glue"]["tasks"][task]["score"]["mean"]) for task in ("cola", "rte")}
    scores["classify"] = ("classify", results["classify"]["tasks"]["the"]["score"]["mean"])
    scores["pseudo-perplexity"] = ("pseudo_perplexity, relative", results["pseudo_perplexity"]["pseudo_perplexity"])
    scores["retrieval after train-embedder"] = ("contrastive", results["contrastive"]["validation_ndcg@10"][-1][1])
    return scores


def write_data(folder: Path, shards: Path) -> Path:
    """Write the data of all evaluations, made from the texts of the sample corpus, and return the folder.

    The label of a sentence says whether it has the word "the". The second text of a pair is the rest of the first one.
    """
    import pyarrow.parquet

    count = sum(ROWS.values())
    texts = pyarrow.parquet.ParquetDataset(shards).read(columns=["content"])["content"].to_pylist()
    passages = [words[at : at + 36] for words in map(str.split, texts) for at in range(0, len(words) - 35, 36)][:count]
    if len(passages) < count:
        raise Failed(f"the sample corpus has {len(passages)} passages of 36 words; {count} are needed")
    sentences, rests = [" ".join(words[:12]) for words in passages], [" ".join(words[12:]) for words in passages]
    labels = ["the" in sentence.lower().split() for sentence in sentences]
    rows = {"train": slice(ROWS["train"]), "validation": slice(ROWS["train"], None)}
    for split, part in rows.items():
        chosen = list(zip(sentences[part], rests[part], labels[part], strict=True))
        write_lines(folder / f"CoLA/{split}.jsonl", [{"sentence": a, "label": int(label)} for a, _, label in chosen])
        entailed = [
            {"sentence1": a, "sentence2": b, "label": "entailment" if label else "not_entailment"}
            for a, b, label in chosen
        ]
        write_lines(folder / f"RTE/{split}.jsonl", entailed)
        classes = [{"text": a, "label": str(label)} for a, _, label in chosen]
        write_lines(folder / f"classify/the/{split}.jsonl", classes)
        pairs = [{"query": a, "positive": b} for a, b, _ in chosen]
        write_lines(folder / f"pairs/{'PAIRS' if split == 'train' else split}.jsonl", pairs)
    write_lines(folder / "texts.jsonl", [{"content": " ".join(words)} for words in passages[:40]])
    (folder / "pairs.yaml").write_text(PAIRS, encoding="utf-8")
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines, and create the folder of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
