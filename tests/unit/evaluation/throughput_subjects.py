"""Encoders small enough to be timed in a test, and two modules that tell or do what a test needs to see."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.evaluation.throughput_steps import Subject, Variant
from megatron_neobert.evaluation.throughput_tables import FORWARD

POSITIONS = 16  # of BERT and RoBERTa
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def build_bert() -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=101, max_position_embeddings=POSITIONS, **_SIZES)).eval()


def save_folders(place: Path) -> list[Path]:
    """place/bert and place/neobert."""
    for name, model in (("bert", build_bert()), ("neobert", build_model())):
        model.save_pretrained(place / name)
    return [place / "bert", place / "neobert"]


def subject_of(model: Any, name: str = "model") -> Subject:
    return Subject(name=name, dtype="float32", model=model)


class Module(nn.Module):
    """Notes every forward in a common list; of more rows than it can take, it asks for a petabyte."""

    def __init__(self, name: str, calls: list[str], most_rows: int = 1 << 30) -> None:
        super().__init__()
        self.name, self.calls, self.most_rows = name, calls, most_rows
        self.weight = nn.Parameter(torch.zeros(10))
        self.config = SimpleNamespace(vocab_size=50, pad_token_id=0, _attn_implementation="eager")

    @property
    def base_model(self) -> "Module":
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        self.calls.append(self.name)
        if len(input_ids) > self.most_rows:
            torch.empty(1 << 50, dtype=torch.uint8)


def variant_of(subject: Subject, passes: str = FORWARD) -> Variant:
    return Variant(model=subject.name, dtype="float32", attention="eager", layout="padded", passes=passes)
