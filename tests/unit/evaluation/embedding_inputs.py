"""Inputs for tests of contrastive fine-tuning and MTEB: tiny encoders, made-up data, and a folder as the Hub."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
import yaml
from json_files import write_jsonl
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.evaluation.data import read_yaml
from megatron_neobert.evaluation.embed_data import ContrastiveConfig

RECIPE = Path(__file__).resolve().parents[3] / "megatron_neobert" / "configs" / "evaluation" / "contrastive.yaml"
WORDS = [first + second for first in "bcdfghklmn" for second in ("a", "e", "i", "o", "u")]
INSTRUCTIONS = {"LARGE": "find :", "SMALL": "similar :", "HARD": "other :"}


def write_encoder(folder: Path) -> Path:
    """Write a BERT with dropout, so that a resumed run needs the state of the random generators."""
    return write_bert(folder, ["find", "similar", "other", ":", *WORDS], positions=32)


def write_bert(folder: Path, words: Sequence[str], *, positions: int) -> Path:
    """Write a BERT of 2 layers x 32, with dropout and its own vocabulary."""
    tokenizer = load_tokenizer(write_vocabulary(folder.parent / "vocab.txt", words))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=tokenizer.vocab_size, max_position_embeddings=positions, **sizes)
    transformers.set_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_tokenizer_files(folder, model_max_length=positions)
    return folder


def make_pairs(count: int, *, negatives: int, seed: int) -> list[dict[str, Any]]:
    """Return pairs whose texts share half of their words, with up to `negatives` random hard negatives each."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        common = draw.sample(WORDS, 3)
        query, positive = (" ".join(common + draw.sample(WORDS, 3)) for _ in range(2))
        hard_negatives = [" ".join(draw.sample(WORDS, 5)) for _ in range(draw.randrange(negatives + 1))]
        pairs.append({"query": query, "positive": positive, "negatives": hard_negatives})
    return pairs


def write_card(folder: Path, splits: dict[str, dict[str, str]]) -> None:
    """Write a dataset card that names the JSON Lines file of every config and split."""
    lines = ["---", "configs:"]
    for config, files in splits.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        lines += [line for split, file in files.items() for line in (f"  - split: {split}", f"    path: {file}.jsonl")]
    (folder / "README.md").write_text("\n".join([*lines, "---"]) + "\n")


def write_datasets(folder: Path) -> Path:
    """Write LARGE with 400 pairs, SMALL with 100, and HARD with 25 and hard negatives."""
    for number, (key, count, negatives) in enumerate((("LARGE", 400, 0), ("SMALL", 100, 1), ("HARD", 25, 3))):
        write_jsonl(folder / f"{key}.jsonl", make_pairs(count, negatives=negatives, seed=number))
    return folder


def read_config(path: Path) -> ContrastiveConfig:
    return read_yaml("--config", path, ContrastiveConfig, remedy="")


def write_yaml(path: Path, **changes: Any) -> Path:
    """Write a file of 100 training steps with the three datasets; `changes` replace training settings."""
    sources = {
        key: {"divisor": divisor, "instruction": INSTRUCTIONS[key]}
        for key, divisor in (("LARGE", 2), ("SMALL", 2), ("HARD", 4))
    }
    training = {"steps": 100, "batch_size": 32, "learning_rate": 3.0e-3, "log_interval": 25, "save_interval": 50}
    content = {"training": training | changes, "datasets": sources}
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


# --- MTEB


MTEB_WORDS = ["wing", "flow", "heat", "card", "money", "bank", "cell", "gene", "food", "health", "the", "of"]
DIGITS = [str(digit) for digit in range(10)] + [f"##{digit}" for digit in range(10)]


def make_encoder(folder: Path) -> Path:
    return write_bert(folder, [*MTEB_WORDS, *DIGITS], positions=64)


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
