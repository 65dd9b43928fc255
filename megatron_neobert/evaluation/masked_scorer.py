"""-log p of tokens that are masked one at a time, by any encoder with a masked-language-model head.

b rows, s tokens of a row, v vocabulary.
"""

from collections.abc import Sequence
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


class Row(NamedTuple):
    """One document with one position to mask."""

    ids_s: NDArray[np.int32]
    position: int


class Scorer:
    """A model ready to score.

    Attributes:
        max_length: Tokens of the longest row for which the model was made.
    """

    def __init__(self, folder: Path, options: LoadOptions | None = None) -> None:
        """Load the model.

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
            losses_b = nn.functional.cross_entropy(self._logits(rows).float(), targets_b, reduction="none")
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
    def _logits(self, rows: Sequence[Row]) -> Tensor:
        """Return the logits of the masked positions, [b, v]."""
        device, longest = self.model.device, max(len(row.ids_s) for row in rows)
        ids_bs = np.full((len(rows), longest), self.tokenizer.pad_token_id or 0, dtype=np.int64)
        mask_bs = np.zeros((len(rows), longest), dtype=np.int64)
        for number, row in enumerate(rows):
            ids_bs[number, : len(row.ids_s)] = row.ids_s
            ids_bs[number, row.position] = self.tokenizer.mask_token_id
            mask_bs[number, : len(row.ids_s)] = 1
        inputs = {"input_ids": torch.from_numpy(ids_bs), "attention_mask": torch.from_numpy(mask_bs)}
        places_b = torch.tensor([row.position for row in rows], device=device)

        def keep_masked(module: nn.Module, arguments: Any, output: Any) -> None:  # heads compute each token by itself
            hidden_bsh = output.last_hidden_state
            output.last_hidden_state = hidden_bsh[torch.arange(len(rows), device=device), places_b][:, None]

        with self.model.base_model.register_forward_hook(keep_masked):
            logits: Tensor = self.model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits
        return logits[:, 0]
