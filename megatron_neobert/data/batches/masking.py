"""Selection of the tokens that the model has to predict, and their replacements.

A token's fate depends on the seed, the epoch, its document and its place in the document: not on where the document is
packed, on how it is cut, on the micro-batch size or on the rank. It is drawn with 16 bits, so rates are exact to
1/65,536. Letters: `t` tokens of a micro-batch, `n` segments, `m` selected tokens.

Source: NeoBERT selects 20 % of the tokens that are not special and replaces all of them by [MASK]
    (chandar-lab/NeoBERT@ed75b68 conf/datacollator/mlm_20.yaml, collator/collator.py); BERT 15 % with 80/10/10.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.batches.packing import Segments
from megatron_neobert.data.batches.philox import Stream, draw_words
from megatron_neobert.errors import ConfigError

_LEVELS = 1 << 16  # of a draw of 16 bits: probabilities are multiples of 1/65,536
_BLOCK_TOKENS = 8  # four 32-bit words give eight draws of 16 bits


@dataclass(frozen=True)
class MaskingScheme:
    """Share of tokens that are selected, and shares of these (sum 1) that become [MASK], a random token, or stay.

    Raises:
        ConfigError: The probability selects nothing or more than everything.
    """

    probability: float = 0.2
    mask_share: float = 1.0
    random_share: float = 0.0
    keep_share: float = 0.0

    def __post_init__(self) -> None:
        if not 1 / _LEVELS <= self.probability <= 1:
            raise ConfigError(
                f"masking probability {self.probability} is outside 1/65,536 to 1; "
                "it is the share of tokens to predict. The paper uses 0.2."
            )


@dataclass(frozen=True)
class TokenIds:
    """The part of a tokenizer that batches depend on."""

    vocab_size: int
    cls: int
    sep: int
    pad: int
    mask: int
    special: tuple[int, ...]  # all special tokens, the four above and [UNK] among them

    @cached_property
    def is_special_v(self) -> NDArray[np.bool_]:
        is_special = np.zeros(self.vocab_size, dtype=np.bool_)
        is_special[list(self.special)] = True
        return is_special

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        return np.flatnonzero(~self.is_special_v)


@dataclass(frozen=True)
class MaskedTokens:
    """The selected tokens of a micro-batch in increasing position. Three arrays of m int64."""

    positions_m: NDArray[np.int64]
    labels_m: NDArray[np.int64]  # original ids
    replacements_m: NDArray[np.int64]  # ids that the model sees instead


def mask_tokens(
    tokens_t: NDArray[np.int64],
    segments: Segments,
    positions_n: NDArray[np.int64],
    *,
    scheme: MaskingScheme,
    ids: TokenIds,
    seed: int,
) -> MaskedTokens:
    """Selects tokens of all segments of a micro-batch; `tokens_t` itself stays as it is.

    Args:
        tokens_t: The micro-batch; tokens outside the segments are never selected.
        positions_n: Where each segment's first token (after its [CLS]) stands in tokens_t.
        seed: At least 0, below 2^64.
    """
    # Draws come in blocks of 8 neighbours, aligned to the start of their document. Blocks of all segments stand end to
    # end; a block's number in its document is its number here plus the shift of its segment.
    first_blocks_n = segments.starts_n // _BLOCK_TOKENS
    blocks_n = -(-(segments.starts_n + segments.lengths_n) // _BLOCK_TOKENS) - first_blocks_n
    block_ends_n = np.cumsum(blocks_n)
    segment_of_block = np.repeat(np.arange(len(segments)), blocks_n)
    block_shift_n = first_blocks_n - (block_ends_n - blocks_n)
    draws_b8 = draw_words(
        Stream.SELECTION,
        seed=seed,
        epoch=segments.epochs_n[segment_of_block],
        item=segments.documents_n[segment_of_block],
        index=np.arange(len(segment_of_block)) + block_shift_n[segment_of_block],
    ).view(np.uint16)

    # Selection, less the draws before and behind each segment in its first and last block.
    selected_b8 = draws_b8 < round(scheme.probability * _LEVELS)
    place = np.arange(_BLOCK_TOKENS)
    head_n = segments.starts_n % _BLOCK_TOKENS
    tail_n = (segments.starts_n + segments.lengths_n - 1) % _BLOCK_TOKENS
    selected_b8[block_ends_n - blocks_n] &= place >= head_n[:, None]
    selected_b8[block_ends_n - 1] &= place <= tail_n[:, None]
    slots_m = np.flatnonzero(selected_b8)

    # Slots are numbered through all blocks; a segment's slots and its tokens advance together.
    position_of_slot_0_n = positions_n - segments.starts_n + block_shift_n * _BLOCK_TOKENS
    segment_m = segment_of_block[slots_m // _BLOCK_TOKENS]
    positions_m = slots_m + position_of_slot_0_n[segment_m]
    labels_m = tokens_t[positions_m]
    ordinary_m = ~ids.is_special_v[labels_m]
    if not ordinary_m.all():
        slots_m, segment_m = slots_m[ordinary_m], segment_m[ordinary_m]
        positions_m, labels_m = positions_m[ordinary_m], labels_m[ordinary_m]

    replacements_m = np.full(len(labels_m), ids.mask)
    if scheme.mask_share < 1:
        # The draw of a selected token lies below the threshold of selection; its place there decides what replaces it.
        draws_m = draws_b8.reshape(-1)[slots_m]
        mask_limit = round(scheme.probability * scheme.mask_share * _LEVELS)
        random_limit = round(scheme.probability * (scheme.mask_share + scheme.random_share) * _LEVELS)
        kept_m = draws_m >= random_limit
        replacements_m[kept_m] = labels_m[kept_m]
        random_r = np.flatnonzero((draws_m >= mask_limit) & ~kept_m)
        replaced = segments[segment_m[random_r]]
        places_r = positions_m[random_r] - positions_n[segment_m[random_r]] + replaced.starts_n
        replacements_m[random_r] = _draw_ordinary_ids(replaced, places_r, ids=ids, seed=seed)
    return MaskedTokens(positions_m, labels_m, replacements_m)


def _draw_ordinary_ids(
    segments: Segments, places_n: NDArray[np.int64], *, ids: TokenIds, seed: int
) -> NDArray[np.int64]:
    """One id for the token at `places_n[i]` of the document of segment i, uniform over all that are not special."""
    words_n4 = draw_words(
        Stream.REPLACEMENT, seed=seed, epoch=segments.epochs_n, item=segments.documents_n, index=places_n
    )
    choice_n = (words_n4[:, 0].astype(np.uint64) * np.uint64(len(ids.ordinary))) >> np.uint64(32)
    return ids.ordinary[choice_n.astype(np.int64)]
