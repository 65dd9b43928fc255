"""Losses of tokens that are masked one at a time, for any encoder with a masked-language-model head.

Shapes: b copies of a document, s tokens, h hidden size, v vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_neobert.errors import ConfigError, ConversionError, DivergenceError
from megatron_neobert.evaluation.models import (
    FLOAT32_ON_CPU,
    UNLIMITED_LENGTH,
    LoadOptions,
    count_learned_positions,
    load_model,
    load_tokenizer,
    longest_input,
)


class Scorer:
    """A masked language model and its tokenizer. Documents are truncated at `max_length` tokens."""

    def __init__(self, folder: Path, options: LoadOptions = FLOAT32_ON_CPU, *, max_length: int | None = None) -> None:
        """Load the model and its tokenizer. A `max_length` of None is the longest input that both support.

        Raises:
            ConversionError: The tokenizer has no mask token.
            ConfigError: The model has fewer learned positions than `max_length`, or there is no maximum length.
        """
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer.mask_token_id is None:
            raise ConversionError(
                f"{folder}: its tokenizer has no mask token, which pseudo-perplexity needs; name an encoder trained "
                "with masks, or add mask_token to tokenizer_config.json."
            )
        self.model = load_model(folder, "AutoModelForMaskedLM", options)
        self.max_length = max_length or longest_input(self.model, self.tokenizer, at_most=UNLIMITED_LENGTH)
        positions = count_learned_positions(self.model)
        if positions is not None and self.max_length > positions:
            raise ConfigError(
                f"--max-length {max_length}: {folder} has {positions} learned positions; give at most {positions}."
            )
        if self.max_length >= UNLIMITED_LENGTH:
            raise ConfigError(f"{folder}: model and tokenizer set no maximum length; give --max-length.")

    def score(self, ids_s: Tensor, positions: Sequence[int]) -> list[float]:
        """Mask each position of a document alone, all in one batch, and return the losses: -log p, in nats.

        Raises DivergenceError if a loss is not finite, and ConfigError if the batch does not fit into GPU memory.
        """
        targets_b = ids_s[list(positions)].long()
        try:
            logits_bv = self._logits(ids_s, positions).float()
            losses_b = nn.functional.cross_entropy(logits_bv, targets_b.to(logits_bv.device), reduction="none")
        except torch.OutOfMemoryError as error:
            tokens = len(positions) * len(ids_s)
            raise ConfigError(
                f"{len(positions)} x {len(ids_s)} tokens do not fit into memory; give --batch-tokens below {tokens}."
            ) from error
        if not losses_b.isfinite().all():
            bad = losses_b[~losses_b.isfinite()][0].item()
            raise DivergenceError(
                f"{self.folder}: the model gives {bad} instead of a loss in "
                f"{str(self.model.dtype).removeprefix('torch.')}; try --dtype float32."
            )
        losses: list[float] = losses_b.tolist()
        return losses

    @torch.inference_mode()
    def _logits(self, ids_s: Tensor, positions: Sequence[int]) -> Tensor:
        """Mask one position in each row, and return the logits there: [b, v], on the model's device."""
        rows_b, positions_b = torch.arange(len(positions)), torch.tensor(positions)
        ids_bs = ids_s.long().repeat(len(positions), 1)
        ids_bs[rows_b, positions_b] = self.tokenizer.mask_token_id
        ids_bs = ids_bs.to(self.model.device)

        def keep_masked_positions(module: nn.Module, arguments: Any, output: Any) -> None:
            output.last_hidden_state = output.last_hidden_state[rows_b, positions_b][:, None]

        # The head computes every position separately, so it only gets the masked ones: [b, 1, h].
        with self.model.base_model.register_forward_hook(keep_masked_positions):
            logits: Tensor = self.model(input_ids=ids_bs, attention_mask=torch.ones_like(ids_bs)).logits
        return logits[:, 0]
