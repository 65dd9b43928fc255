"""Write small valid inputs of every kind that a command reads from disk."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mteb
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from json_files import write_jsonl
from transformers import EuroBertConfig, EuroBertForMaskedLM
from unit.data.small_corpus import SPECIAL, write_vocabulary
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

WORDS = [*SPECIAL, *(f"{end}{letter}" for letter in "abcdefghijk" for end in ("", "##"))]
_TEXTS = ["a bad cab", "dead beef", "a cage", "bead face", "jade", "a fig", "ace", "bag of k"]
_POSITIONS = 32
TRAINING = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 2 --lr-warmup-iters 1 --lr-decay-iters 2 --eval-iters 0 "
    "--num-workers 0 --log-interval 1"
)


class Inputs(NamedTuple):
    """Path of each kind of input; a test replaces one of them by a hostile copy."""

    model: Path
    checkpoint: Path  # folder given as --save or --load
    corpus: Path  # folder with P_content_document.*
    dataset: Path  # folder with one data set per evaluation
    records: Path  # folder with records of evaluations
    texts: Path  # folder with input files for preprocessing
    tokenizer: Path
    settings: Path  # folder with YAML files


class Reader(NamedTuple):
    """A command and the kinds of input that it reads."""

    command: str
    kinds: tuple[str, ...]
    template: str  # arguments with the kinds of inputs, {prefix} of the corpus, and {output}
    opens_checkpoints: bool = True  # False: reads only the metrics and settings of a checkpoint

    def arguments(self, inputs: Inputs, output: Path) -> list[str]:
        """Return the arguments for these inputs and an output folder."""
        paths = {**inputs._asdict(), "prefix": prefix_in(inputs.corpus), "output": output}
        return [word.format(**paths) for word in self.template.split()]


def write_model(folder: Path) -> Path:
    """Write an encoder in the eurobert layout, with a tokenizer and the files of sentence-transformers."""
    write_tokenizer(folder)
    write_eurobert(
        folder, folder, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, mlp_bias=True,
        max_position_embeddings=_POSITIONS,
    )  # fmt: skip
    write_modules(folder, {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": _POSITIONS, "do_lower_case": False})
    write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True})
    return folder


def write_eurobert(folder: Path, tokenizer: Path, **sizes: int) -> Path:
    """Write a model with random weights and the ids of a tokenizer, as transformers does."""
    loaded = load_tokenizer(tokenizer)
    torch.manual_seed(0)
    config = EuroBertConfig(
        **sizes, vocab_size=loaded.vocab_size, pad_token_id=loaded.pad_id, bos_token_id=loaded.cls_id,
        eos_token_id=loaded.sep_id, mask_token_id=loaded.mask_id,
    )  # fmt: skip
    EuroBertForMaskedLM(config).save_pretrained(folder)
    loaded.save_tokenizer_files(folder, model_max_length=sizes["max_position_embeddings"])
    return folder


def write_neobert(folder: Path) -> Path:
    """Write a model in the neobert layout without modeling code, and its tokenizer."""
    build_model(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=12,
        max_position_embeddings=_POSITIONS,
    ).save_pretrained(folder)  # fmt: skip
    return write_tokenizer(folder)


def write_modules(folder: Path, types: Mapping[str, str]) -> None:
    """Write sentence-transformers' modules.json; `types` maps the folder of each module to its type."""
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{type_}"}
        for number, (path, type_) in enumerate(types.items())
    ]
    write_json(folder / "modules.json", entries)


def write_tokenizer(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    vocabulary = write_vocabulary(folder / "vocab.txt", WORDS[len(SPECIAL) :])
    load_tokenizer(vocabulary).save_tokenizer_files(folder, model_max_length=_POSITIONS)
    return folder


def write_dataset(folder: Path) -> Path:
    """Write a data set for each evaluation: RTE, also with a text to classify, tagged words, BIOSSES, pairs, texts."""
    pairs = {"sentence1": _TEXTS, "sentence2": _TEXTS[::-1], "text": _TEXTS, "label": [0, 1] * 4}
    for split in ("train", "validation", "test"):
        write_parquet(folder / "rte" / f"{split}.parquet", pairs)
        tagged = {
            "tokens": [text.split() for text in _TEXTS],
            "ner_tags": [["B-X", *["O"] * text.count(" ")] for text in _TEXTS],
        }
        write_parquet(folder / "tagged" / f"{split}.parquet", tagged)
    scored = {"sentence1": _TEXTS, "sentence2": _TEXTS[::-1], "score": list(range(len(_TEXTS)))}
    (biosses,) = mteb.get_tasks(tasks=["BIOSSES"])
    write_parquet(folder / "BIOSSES" / biosses.metadata.revision / "test.parquet", scored)
    write_parquet(folder / "PAIRS.parquet", {"query": _TEXTS * 2, "positive": _TEXTS[::-1] * 2})
    write_jsonl(folder / "texts.jsonl", ({"text": text} for text in _TEXTS))
    return folder


def write_texts(folder: Path) -> Path:
    """Write input files for preprocessing."""
    write_jsonl(folder / "a.jsonl", ({"content": text} for text in _TEXTS))
    write_parquet(folder / "b.parquet", {"content": _TEXTS})
    return folder


def write_settings(folder: Path) -> Path:
    training = {"steps": 1, "batch_size": 4, "learning_rate": 1e-3, "max_length": _POSITIONS}
    write_text(
        folder / "contrastive.yaml", yaml.safe_dump({"training": training, "datasets": {"PAIRS": {"instruction": "a"}}})
    )
    write_text(folder / "instructions.yaml", "types: {STS: a}\n")
    write_text(folder / "train.yaml", "training: {seed: 0}\n")
    return folder


def write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content))


def write_text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def write_parquet(path: Path, columns: Mapping[str, list[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path)


def prefix_in(folder: Path) -> Path:
    """Return the prefix of the only corpus in a folder."""
    return next(path for path in sorted(folder.iterdir()) if path.name.endswith("_document.idx")).with_suffix("")
