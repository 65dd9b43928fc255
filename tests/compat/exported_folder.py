"""Load models, tokenizer and pipelines of an exported folder as a user of transformers does.

Needs torch and transformers 4.57 or later only. Code of the folder is executed if it is trusted.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

VERSION = Version(transformers.__version__)
# Largest difference relative to the largest value, in fp32. The errors that checks detect are 0.1 or larger.
TOLERANCE = 1e-4
FIRST_NATIVE = Version("5.3")  # with EuroBERT


@dataclass(frozen=True)
class Batch:
    """A batch of texts, padded on the right, and their lengths in tokens."""

    input_ids: Tensor
    attention_mask: Tensor
    lengths: tuple[int, ...]

    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


@dataclass(frozen=True)
class Subject:
    """A folder, whose own code is executed if it has any."""

    folder: Path

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Content of config.json."""
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    @property
    def auto_map(self) -> dict[str, str]:
        return self.fields.get("auto_map", {})

    @property
    def is_known(self) -> bool:
        """True if the models' classes are in the folder or in this version of transformers."""
        return bool(self.auto_map) or VERSION >= FIRST_NATIVE

    def load_with_info(self, class_name: str, *, folder: Path | None = None, **options: Any) -> tuple[Any, dict]:
        """Return a model in fp32 and evaluation mode, and the loading report of transformers."""
        options.setdefault("dtype", torch.float32)
        if VERSION.major < 5:
            options["torch_dtype"] = options.pop("dtype")
        model, info = getattr(transformers, class_name).from_pretrained(
            folder or self.folder,
            trust_remote_code=bool(self.auto_map),
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
        return model.eval(), info

    def load(self, class_name: str, **options: Any) -> Any:
        return self.load_with_info(class_name, **options)[0]

    def tokenizer(self, folder: Path | None = None) -> Any:
        return transformers.AutoTokenizer.from_pretrained(
            folder or self.folder, trust_remote_code=False, local_files_only=True
        )

    @cached_property
    def words(self) -> list[str]:
        """Words with a single token."""
        tokenizer = self.tokenizer()
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        return [word for word, id in vocabulary if word.isalnum() and tokenizer(word)["input_ids"][1:-1] == [id]]

    def text(self, tokens: int, *, start: int = 0) -> str:
        """Return a text of this number of tokens, including [CLS] and [SEP]."""
        return " ".join(self.words[(start + 7 * index) % len(self.words)] for index in range(tokens - 2))

    def encode(self, text: str) -> dict[str, Tensor]:
        return self.tokenizer()(text, return_tensors="pt")

    def batch(self, lengths: tuple[int, ...] = (12, 7, 4)) -> Batch:
        texts = [self.text(tokens, start=3 * row) for row, tokens in enumerate(lengths)]
        encoded = self.tokenizer()(texts, padding=True, return_tensors="pt")
        return Batch(encoded["input_ids"], encoded["attention_mask"], lengths)


def expect_close(actual: Tensor, expected: Tensor, name: str) -> None:
    """Assert that the difference is at most TOLERANCE, relative to the largest value. NaN is an infinite difference."""
    assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    difference = (actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
    relative = float(torch.nan_to_num(difference, nan=float("inf")))
    assert relative <= TOLERANCE, f"{name}: differs by {relative:.2g} of the largest value, more than {TOLERANCE:g}"
