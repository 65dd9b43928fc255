"""A folder with small GLUE tasks, a model for them, and runs on them.

Every text is five words; its label follows from how many of them are "cat", so that a small model learns it.
"""

import random
from pathlib import Path
from typing import Any

from unit.evaluation.pseudo_perplexity_models import write_model

from megatron_neobert.evaluation.fine_tune import Point, Run
from megatron_neobert.evaluation.glue import TASKS
from megatron_neobert.evaluation.options import GlueOptions

HEADERS = {
    "RTE": "sentence1,sentence2,label",
    "MNLI": "premise,hypothesis,label",
    "STS-B": "sentence1,sentence2,label",
    "SST-2": "sentence,label",
}
SPLITS = {"train": 48, "validation": 24}
POINT = Point(batch_size=8, learning_rate=3e-3, weight_decay=1e-5, seed=0)


def write_glue(folder: Path) -> Path:
    """Write RTE, MNLI, STS-B and SST-2 as CSV files."""
    rng = random.Random(0)
    for title, header in HEADERS.items():
        (folder / title).mkdir(parents=True)
        for split, count in SPLITS.items():
            ends = ("_matched", "_mismatched") if title == "MNLI" and split != "train" else ("",)
            for end in ends:
                lines = [_line(rng, title) for _ in range(count)]
                (folder / title / f"{split}{end}.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder


def _line(rng: random.Random, title: str) -> str:
    cats = rng.randrange(6 if title == "STS-B" else 3 if title == "MNLI" else 2)
    words = ["cat"] * cats + rng.choices(["sat", "on", "a", "mat"], k=5 - cats)
    rng.shuffle(words)
    text = " ".join(words)
    label = {
        "RTE": ("entailment", "not_entailment"),
        "MNLI": ("entailment", "neutral", "contradiction"),
        "STS-B": tuple("012345"),
        "SST-2": ("0", "1"),
    }[title][cats]
    return ",".join([text, label] if title == "SST-2" else [text, "the mat", label])


def make_place(folder: Path) -> Path:
    """The folder with `glue` and a BERT in `model`."""
    write_glue(folder / "glue")
    write_model(folder / "model", "Bert")
    return folder


def build_options(place: Path, *tasks: str, output: str = "output", **changes: Any) -> GlueOptions:
    given = {
        "model": place / "model",
        "data_dir": place / "glue",
        "output": place / output,
        "tasks": tasks,
        "batch_size": (8,),
        "learning_rate": (3e-3,),
        "weight_decay": (1e-5,),
        "epochs": 1,
        "no_transfer": True,
        "device": "cpu",
    }
    return GlueOptions(**{**given, **changes})


def build_run(place: Path, task: str, *, point: Point = POINT, start: Path | None = None, **changes: Any) -> Run:
    return Run(
        task=TASKS[task],
        point=point,
        start=start or place / "model",
        folder=place / "runs" / f"{task}-{point.name}",
        options=build_options(place, task, **{"epochs": 2, **changes}),
    )
