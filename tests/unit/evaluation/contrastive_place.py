"""A tiny encoder, datasets of made-up words and a YAML file, for tests of contrastive fine-tuning."""

import json
import random
from pathlib import Path
from typing import Any

import yaml
from unit.evaluation.tiny_bert import write_bert

WORDS = [first + second for first in "bcdfghklmn" for second in ("a", "e", "i", "o", "u")]
INSTRUCTIONS = {"LARGE": "find :", "SMALL": "similar :", "HARD": "other :"}


def write_encoder(folder: Path) -> Path:
    """With dropout, so that a resumed run needs the state of the generators."""
    return write_bert(folder, ["find", "similar", "other", ":", *WORDS], positions=32)


def make_pairs(count: int, *, negatives: int, seed: int) -> list[dict[str, Any]]:
    """A positive shares half of its words with its query; up to `negatives` negatives share none on purpose."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        common = draw.sample(WORDS, 3)
        query, positive = (" ".join(common + draw.sample(WORDS, 3)) for _ in range(2))
        others = [" ".join(draw.sample(WORDS, 5)) for _ in range(draw.randrange(negatives + 1))]
        rows.append({"query": query, "positive": positive, "negatives": others})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_datasets(folder: Path) -> Path:
    """LARGE of 400 rows, SMALL of 100 and HARD of 25 with hard negatives."""
    folder.mkdir()
    for number, (key, count, negatives) in enumerate((("LARGE", 400, 0), ("SMALL", 100, 1), ("HARD", 25, 3))):
        write_jsonl(folder / f"{key}.jsonl", make_pairs(count, negatives=negatives, seed=number))
    return folder


def write_yaml(path: Path, **training: Any) -> Path:
    sources = {
        key: {"divisor": divisor, "instruction": INSTRUCTIONS[key]}
        for key, divisor in (("LARGE", 2), ("SMALL", 2), ("HARD", 4))
    }
    given = {"steps": 100, "batch_size": 32, "learning_rate": 3.0e-3, "log_interval": 25, "save_interval": 50}
    given |= training
    path.write_text(yaml.safe_dump({"training": given, "datasets": sources}, sort_keys=False), encoding="utf-8")
    return path
