"""Inputs for tests of MTEB: a tiny encoder, and a folder in place of the Hub."""

import shutil
from pathlib import Path

from json_files import write_jsonl
from unit.evaluation.contrastive_inputs import write_bert, write_card

WORDS = ["wing", "flow", "heat", "card", "money", "bank", "cell", "gene", "food", "health", "the", "of"]
DIGITS = [str(digit) for digit in range(10)] + [f"##{digit}" for digit in range(10)]


def make_encoder(folder: Path) -> Path:
    return write_bert(folder, [*WORDS, *DIGITS], positions=64)


def write_hub(folder: Path) -> Path:
    """Write folders with the names of two datasets of the Hub, which `load_dataset` prefers to the Hub."""
    rows = [{"sentence1": f"gene {i}", "sentence2": f"cell {i * i}", "score": float(i % 5)} for i in range(8)]
    write_jsonl(folder / "mteb/biosses-sts/test.jsonl", rows)
    retrieval = folder / "mteb/nfcorpus"
    write_jsonl(retrieval / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": f"food {i}"} for i in range(9)])
    write_jsonl(retrieval / "queries.jsonl", [{"_id": f"q{i}", "text": f"food {i}"} for i in range(3)])
    write_jsonl(retrieval / "qrels.jsonl", [{"query-id": f"q{i}", "corpus-id": f"d{i}", "score": 1} for i in range(3)])
    splits = {"default": {"test": "qrels"}, "corpus": {"corpus": "corpus"}, "queries": {"queries": "queries"}}
    write_card(retrieval, splits)
    return folder


def replace_hub(monkeypatch, hub: Path) -> None:
    """Let `snapshot_download` copy the folders of `write_hub`."""

    def download(name: str, *, repo_type: str, revision: str, local_dir: Path) -> None:
        assert repo_type == "dataset" and len(revision) == 40
        shutil.copytree(hub / name, local_dir, dirs_exist_ok=True)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
