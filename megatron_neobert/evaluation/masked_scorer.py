"""-log p of tokens that are masked one at a time, by any encoder with a masked-language-model head.

Only the masked position goes through the head, which for short rows and a large vocabulary is most of the work: a hook
cuts the encoder's output down to that position before the head sees it, for any kind of head. Each model is
tried first, and a head that needs the other positions gets all of them.

b rows, s tokens of a row, h hidden, v vocabulary.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_neobert.errors import ConfigError, ConversionError, DivergenceError
from megatron_neobert.evaluation.models import (
    ABSURD_LENGTH,
    LoadOptions,
    count_learned_positions,
    load_model,
    load_tokenizer,
    longest_input,
)

# Of the largest logit. Measured on a CPU, 2 layers x 32, architectures of transformers: fp32 up to 4.3e-7 (24 of them),
# bf16 0 (24), fp16 0 (22).
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_PROBE_TOKENS = 24  # of the longer of two rows, tried both ways


class Row(NamedTuple):
    """One document with one position to mask."""

    ids_s: NDArray[np.int32]
    position: int


class Scorer:
    """A model ready to score.

    Attributes:
        is_sparse: True if only the masked position goes through the head.
        max_length: Tokens of the longest row for which the model was made.
    """

    def __init__(self, folder: Path, options: LoadOptions | None = None) -> None:
        """Load and try the model.

        Raises:
            MissingInputError: There is no such folder.
            ConversionError: It has no usable head or tokenizer, or no mask token.
        """
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer.mask_token_id is None:
            raise ConversionError(
                f"{folder}: its tokenizer has no mask token, and pseudo-perplexity masks one token at a time; name an "
                "encoder trained with masks, or add mask_token to tokenizer_config.json."
            )
        self.model = load_model(folder, "AutoModelForMaskedLM", options)
        self._learned_positions = count_learned_positions(self.model)
        self.max_length = longest_input(self.model, self.tokenizer, at_most=ABSURD_LENGTH)
        self.is_sparse = self._head_takes_single_positions()

    def check_length(self, max_length: int) -> None:
        """Refuse rows that the model cannot read.

        Raises:
            ConfigError: There are fewer learned positions, or no limit is known and none was given.
        """
        if self._learned_positions is not None and max_length > self._learned_positions:
            raise ConfigError(
                f"--max-length {max_length}: {self.folder} has {self._learned_positions} learned positions and nothing "
                f"beyond them; give at most {self._learned_positions}."
            )
        if max_length >= ABSURD_LENGTH:
            raise ConfigError(f"{self.folder} names no longest input; give --max-length.")

    def score(self, rows: Sequence[Row]) -> list[float]:
        """Return -log p(token) in nats for the masked token of each row.

        Raises:
            DivergenceError: The model's answer is not a number.
            ConfigError: The rows do not fit into memory together.
        """
        targets_b = torch.tensor([row.ids_s[row.position] for row in rows], dtype=torch.long, device=self.model.device)
        try:
            logits_bv = self._logits(rows, sparse=self.is_sparse)
            losses_b = nn.functional.cross_entropy(logits_bv.float(), targets_b, reduction="none")
        except torch.OutOfMemoryError as error:
            longest = max(len(row.ids_s) for row in rows)
            raise ConfigError(
                f"{len(rows)} rows of up to {longest} tokens do not fit into memory; give --batch-tokens below "
                f"{len(rows) * longest}."
            ) from error
        losses: list[float] = losses_b.tolist()
        if not all(np.isfinite(losses)):
            raise DivergenceError(
                f"{self.folder}: the model gives {losses[int(np.isfinite(losses).argmin())]} instead of a loss in "
                f"{str(self.model.dtype).removeprefix('torch.')}; try --dtype float32."
            )
        return losses

    @torch.inference_mode()
    def _logits(self, rows: Sequence[Row], *, sparse: bool) -> Tensor:
        """Return the logits of the masked positions, [b, v]."""
        device, longest = self.model.device, max(len(row.ids_s) for row in rows)
        ids_bs = np.full((len(rows), longest), self.tokenizer.pad_token_id or 0, dtype=np.int64)
        mask_bs = np.zeros((len(rows), longest), dtype=np.int64)
        for number, row in enumerate(rows):
            ids_bs[number, : len(row.ids_s)] = row.ids_s
            ids_bs[number, row.position] = self.tokenizer.mask_token_id
            mask_bs[number, : len(row.ids_s)] = 1
        inputs = {
            "input_ids": torch.from_numpy(ids_bs).to(device),
            "attention_mask": torch.from_numpy(mask_bs).to(device),
        }
        places_b = torch.tensor([row.position for row in rows], device=device)
        if sparse:
            with _only_positions(self.model, places_b, tokens=longest):
                logits_bv: Tensor = self.model(**inputs).logits[:, 0]
        else:
            logits_bv = self.model(**inputs).logits[torch.arange(len(rows), device=device), places_b]
        return logits_bv

    def _head_takes_single_positions(self) -> bool:
        """Return whether two rows, one of them padded, get the same logits both ways; warn otherwise."""
        known = min(self.model.config.vocab_size, len(self.tokenizer))
        length = max(2, min(_PROBE_TOKENS, self.max_length))
        ids = np.random.default_rng(0).integers(known, size=length, dtype=np.int32)
        rows = [Row(ids, length // 3), Row(ids[: length // 2], length // 2 - 1)]
        try:
            found_bv = self._logits(rows, sparse=True)
        except _OtherShapeError as error:
            difference = str(error)
        else:
            expected_bv = self._logits(rows, sparse=False)
            gap = ((found_bv - expected_bv).abs().max() / expected_bv.abs().max()).item()
            if gap <= _TOLERANCES[self.model.dtype]:
                return True
            difference = f"its logits differ by {gap:.1e} of the largest"
        warnings.warn(
            f"{self.folder}: the head of {type(self.model).__name__} does not work on single positions "
            f"({difference}); every position goes through it, which takes more time and memory.",
            stacklevel=3,
        )
        return False


class _OtherShapeError(Exception):
    """The encoder's output is not one vector per token."""


@contextmanager
def _only_positions(model: Any, places_b: Tensor, *, tokens: int) -> Iterator[None]:
    """Cut the encoder's output [b, s, h] to [b, 1, h] before the head sees it, within this block."""
    rows = len(places_b)

    def cut(module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        hidden_bsh = outputs[0]
        if module is model or hidden_bsh.shape[:2] != (rows, tokens):
            raise _OtherShapeError(
                f"{type(module).__name__} gives {list(hidden_bsh.shape)} for {rows} x {tokens} tokens"
            )
        chosen_b1h = hidden_bsh[torch.arange(rows, device=places_b.device), places_b][:, None]
        if isinstance(outputs, tuple):
            return (chosen_b1h, *outputs[1:])
        outputs[next(iter(outputs))] = chosen_b1h
        return outputs

    hook = model.base_model.register_forward_hook(cut)
    try:
        yield
    finally:
        hook.remove()
