"""Inputs for tests of fine-tuning: options, and for GLUE small tasks, a model, and runs.

Every text has five words. Its label depends on how many of them are "cat", so a small model learns the task.
"""

import random
from pathlib import Path
from typing import Any

from unit.evaluation.pseudo_perplexity_models import write_model

from megatron_neobert.evaluation.fine_tune import Point, Run
from megatron_neobert.evaluation.glue import TASKS
from megatron_neobert.evaluation.options import GlueOptions

# Header of the CSV files, and the label for each number of cats.
FORMATS = {
    "RTE": ("sentence1,sentence2,label", ("entailment", "not_entailment")),
    "MNLI": ("premise,hypothesis,label", ("entailment", "neutral", "contradiction")),
    "STS-B": ("sentence1,sentence2,label", tuple("012345")),
    "SST-2": ("sentence,label", ("0", "1")),
}
ROW_COUNTS = {"train": 48, "validation": 24}
POINT = Point(batch_size=8, learning_rate=3e-3, weight_decay=1e-5, seed=0)


def write_inputs(folder: Path) -> Path:
    """Write RTE, MNLI, STS-B and SST-2 as CSV files to folder/glue, and a BERT to folder/model."""
    rng = random.Random(0)
    for title, (header, _) in FORMATS.items():
        (folder / "glue" / title).mkdir(parents=True)
        for split, count in ROW_COUNTS.items():
            for suffix in ("_matched", "_mismatched") if title == "MNLI" and split != "train" else ("",):
                lines = [header, *(_line(rng, title) for _ in range(count))]
                (folder / "glue" / title / f"{split}{suffix}.csv").write_text("\n".join(lines) + "\n")
    write_model(folder / "model", "Bert")
    return folder


def _line(rng: random.Random, title: str) -> str:
    header, labels = FORMATS[title]
    cats = rng.randrange(len(labels))
    words = ["cat"] * cats + rng.choices(["sat", "on", "a", "mat"], k=5 - cats)
    rng.shuffle(words)
    texts = [" ".join(words)] if header.startswith("sentence,") else [" ".join(words), "the mat"]
    return ",".join([*texts, labels[cats]])


def one_point(kind: type, folder: Path, **changes: Any) -> Any:
    """Return options of `kind` with one point, for a folder with a model and data."""
    folders = {"model": folder / "model", "data_dir": folder / "data", "output": folder / "output"}
    point = {"batch_size": (8,), "learning_rate": (1e-3,), "weight_decay": (1e-5,), "device": "cpu"}
    return kind(**{**folders, **point, **changes})


def build_options(inputs: Path, *tasks: str, output: str = "output", **changes: Any) -> GlueOptions:
    folders = {"data_dir": inputs / "glue", "output": inputs / output}
    point = {"learning_rate": (3e-3,), "epochs": 1, "no_transfer": True}
    return one_point(GlueOptions, inputs, tasks=tasks, **{**folders, **point, **changes})


def build_run(inputs: Path, task: str, *, point: Point = POINT, start: Path | None = None, **changes: Any) -> Run:
    return Run(
        task=TASKS[task],
        point=point,
        start=start or inputs / "model",
        folder=inputs / "runs" / f"{task}-{point.name}",
        options=build_options(inputs, task, **{"epochs": 2, **changes}),
    )
