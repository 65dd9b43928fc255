"""An exported folder as a user of transformers loads it: its models, tokenizer and pipelines.

Needs torch and transformers alone, any version from 4.57 on. Nothing else in this project lets a folder's own
code run.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

VERSION = Version(transformers.__version__)
# Largest difference over largest value, in fp32. What is told apart is wrong by a tenth or more.
TOLERANCE = 1e-4
FIRST_NATIVE = Version("5.3")
NATIVE = {
    "eurobert": f"transformers {VERSION} does not know EuroBERT, which came with 5.3",
    "llama": f"transformers {VERSION} ignores is_causal=false of a LlamaModel, which 5.3 honours",
}
CHECKS: dict[str, Callable[["Subject"], None]] = {}  # of export_checks.py, in its order


class NotApplicable(Exception):
    """A check that cannot be asked of this layout or version; the text is the reason."""


@dataclass(frozen=True)
class Batch:
    """Two or more texts in one batch, padded on the right, and their lengths in tokens."""

    input_ids: Tensor
    attention_mask: Tensor
    lengths: tuple[int, ...]

    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


@dataclass(frozen=True)
class Subject:
    """A folder, and whether the user lets its code run."""

    folder: Path
    trusted: bool

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Of config.json, as written."""
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    @property
    def auto_map(self) -> dict[str, str]:
        return self.fields.get("auto_map", {})

    @property
    def reason_against_models(self) -> str | None:
        """Why this version of transformers cannot have this folder's models; None if it can."""
        return NATIVE.get(self.fields["model_type"]) if VERSION < FIRST_NATIVE else None

    def has(self, class_name: str) -> bool:
        """Whether such a model exists for this layout, in the folder or in transformers."""
        if self.auto_map:
            return class_name in self.auto_map
        mapping = getattr(transformers, class_name)._model_mapping
        return transformers.CONFIG_MAPPING[self.fields["model_type"]] in mapping

    def load_with_info(self, class_name: str, *, folder: Path | None = None, **options: Any) -> tuple[Any, dict]:
        """A model in fp32 and evaluation mode, and what transformers reports about its weights."""
        if not self.has(class_name):
            where = "auto_map" if self.auto_map else f"transformers {VERSION}"
            raise NotApplicable(f"{where} has no {class_name} for {self.fields['model_type']}")
        options.setdefault("dtype", torch.float32)
        if VERSION.major < 5:
            options["torch_dtype"] = options.pop("dtype")
        model, info = getattr(transformers, class_name).from_pretrained(
            folder or self.folder,
            trust_remote_code=self.trusted,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
        return model.eval(), info

    def load(self, class_name: str, **options: Any) -> Any:
        return self.load_with_info(class_name, **options)[0]

    @property
    def main_class(self) -> str:
        """The masked language model, or the backbone where a layout has none."""
        return "AutoModelForMaskedLM" if self.has("AutoModelForMaskedLM") else "AutoModel"

    def load_main(self, **options: Any) -> Any:
        return self.load(self.main_class, **options)

    def tokenizer(self, folder: Path | None = None) -> Any:
        return transformers.AutoTokenizer.from_pretrained(folder or self.folder, local_files_only=True)

    def pipeline(self, task: str, class_name: str) -> Any:
        """Build a pipeline by the folder's name."""
        if not self.has(class_name):
            raise NotApplicable(f"there is no {class_name} for {self.fields['model_type']}")
        options = {"torch_dtype" if VERSION.major < 5 else "dtype": torch.float32}  # as `load`, whichever is stored
        return transformers.pipeline(
            task, model=str(self.folder), trust_remote_code=self.trusted, device="cpu", **options
        )

    @cached_property
    def words(self) -> list[str]:
        """Whole words that are one token each."""
        tokenizer = self.tokenizer()
        known = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        return [piece for piece, number in known if piece.isalnum() and tokenizer(piece)["input_ids"][1:-1] == [number]]

    def text(self, tokens: int, *, start: int = 0) -> str:
        """A text of so many tokens, [CLS] and [SEP] included."""
        return " ".join(self.words[(start + 7 * index) % len(self.words)] for index in range(tokens - 2))

    def encode(self, text: str) -> dict[str, Tensor]:
        return self.tokenizer()(text, return_tensors="pt")

    def batch(self, lengths: tuple[int, ...] = (12, 7, 4)) -> Batch:
        texts = [self.text(tokens, start=3 * row) for row, tokens in enumerate(lengths)]
        encoded = self.tokenizer()(texts, padding=True, return_tensors="pt")
        return Batch(encoded["input_ids"], encoded["attention_mask"], lengths)


def main_output(outputs: Any) -> Tensor:
    """The logits, or the last hidden states of a model without a head."""
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def expect_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Asserts a difference below TOLERANCE of the largest value; NaN is infinitely far."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    difference = (actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
    apart = float(torch.nan_to_num(difference, nan=float("inf")))
    assert apart <= TOLERANCE, f"{what}: {apart:.2g} of the largest value apart, allowed are {TOLERANCE:g}"


def check(name: str) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Puts a function into CHECKS. It returns, raises NotApplicable, or fails with any other exception."""

    def add(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
        CHECKS[name] = function
        return function

    return add


def run_checks(folder: Path, *, trusted: bool) -> dict[str, str]:
    """The outcome of every check."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    subject, found = Subject(folder, trusted), {}
    for name, function in CHECKS.items():
        try:
            if name != "tokenizer" and subject.reason_against_models is not None:
                raise NotApplicable(subject.reason_against_models)
            torch.manual_seed(0)  # for heads that are new
            function(subject)
            found[name] = "ok"
        except NotApplicable as reason:
            found[name] = f"not applicable: {reason}"
        except Exception as error:  # anything that transformers raises is an answer
            found[name] = f"FAILED: {type(error).__name__}: {error}"
    return found
