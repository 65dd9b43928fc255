"""A tiny encoder, files of local tasks, and a folder that load_dataset takes for the Hub's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unit.evaluation.tiny_bert import write_bert

WORDS = ["wing", "flow", "heat", "card", "money", "bank", "cell", "gene", "food", "health", "the", "of"]
DIGITS = [str(digit) for digit in range(10)] + [f"##{digit}" for digit in range(10)]


def make_encoder(folder: Path) -> Path:
    return write_bert(folder, [*WORDS, *DIGITS], positions=64)


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(folder: Path) -> Path:
    """local:sts: the more words two sentences share, the higher the score."""
    folder.mkdir(parents=True)
    lines = ["sentence1\tsentence2\tscore"]
    for shared in range(6):
        for start in range(3):
            left = [WORDS[(start + i) % 12] for i in range(5)]
            right = left[:shared] + [WORDS[(start + 5 + i) % 12] for i in range(5 - shared)]
            lines.append(f'{" ".join(left)}\t{" ".join(right)} "\t{shared}')  # a bare quote is text
    (folder / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_beir(folder: Path) -> Path:
    write_lines(
        folder / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": f"{w} {i}"} for i, w in enumerate(WORDS)]
    )
    write_lines(folder / "queries.jsonl", [{"_id": f"q{i}", "text": f"{WORDS[i]} {i}"} for i in range(4)])
    rows = [f"q{i}\td{i}\t1" for i in range(4)]
    (folder / "qrels.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n")
    return folder


def write_hub(folder: Path) -> Path:
    """Folders with the names of two data sets of the Hub: load_dataset prefers them to it."""
    rows = [{"sentence1": f"gene {i}", "sentence2": f"cell {i * i}", "score": float(i % 5)} for i in range(8)]
    write_lines(folder / "mteb/biosses-sts/test.jsonl", rows)
    retrieval = folder / "mteb/nfcorpus"
    write_lines(retrieval / "corpus.jsonl", [{"_id": f"d{i}", "title": f"{i}", "text": f"food {i}"} for i in range(9)])
    write_lines(retrieval / "queries.jsonl", [{"_id": f"q{i}", "text": f"food {i}"} for i in range(3)])
    write_lines(retrieval / "qrels.jsonl", [{"query-id": f"q{i}", "corpus-id": f"d{i}", "score": 1} for i in range(3)])
    configs = {"default": ("test", "qrels"), "corpus": ("corpus", "corpus"), "queries": ("queries", "queries")}
    lines = ["---", "configs:"]
    for name, (split, file) in configs.items():
        lines += [f"- config_name: {name}", "  data_files:", f"  - split: {split}", f"    path: {file}.jsonl"]
    (retrieval / "README.md").write_text("\n".join([*lines, "---"]) + "\n")
    return folder
