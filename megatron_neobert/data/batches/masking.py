"""Selection of the tokens that the model has to predict, and their replacements.

Whether a token is selected depends on the seed, the epoch, its document and its index in the document. It does not
depend on packing, on the micro-batch size or on the rank. Draws have 16 bits, so rates are exact to 1/65,536.

Letters: `t` tokens of a micro-batch, `n` segments, `m` selected tokens, `b` blocks of 8 tokens, `r` tokens that are
replaced by random ones.

Source: NeoBERT selects 20 % of the tokens that are not special and replaces all of them by [MASK]
    (chandar-lab/NeoBERT@ed75b68 conf/datacollator/mlm_20.yaml, collator/collator.py); BERT 15 % with 80/10/10.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.batches.packing import Segments
from megatron_neobert.data.batches.philox import RandomStream, draw_words

_LEVELS = 1 << 16  # values of a 16-bit draw
_BLOCK_TOKENS = 8  # four 32-bit words give eight 16-bit draws

# With "bert": shares of the selected tokens that become [MASK], and random tokens. The rest keeps the original token.
_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1


@dataclass(frozen=True)
class TokenIds:
    """Vocabulary size and special token ids of a tokenizer."""

    vocab_size: int
    cls: int
    sep: int
    pad: int
    mask: int
    special: tuple[int, ...]  # ids of all special tokens: the four above, [UNK] and any others

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
    """Selected tokens of a micro-batch, by increasing position."""

    positions_m: NDArray[np.int64]  # indices into tokens_t
    labels_m: NDArray[np.int64]  # original ids
    replacements_m: NDArray[np.int64]  # ids that replace them in the input


def mask_tokens(
    tokens_t: NDArray[np.int64],
    segments: Segments,
    positions_n: NDArray[np.int64],
    *,
    mask_prob: float,
    mask_replacement: str,
    ids: TokenIds,
    seed: int,
) -> MaskedTokens:
    """Select tokens of a micro-batch and draw their replacements, without changing `tokens_t`.

    Special tokens, including [UNK], and tokens outside the segments are never selected. The result can be empty.

    Args:
        tokens_t: Token ids of the micro-batch.
        segments: Segments of the micro-batch in order, with at least one token each.
        positions_n: Index in tokens_t of each segment's first text token, after the segment's [CLS] if any.
        mask_prob: Share of the tokens to select, from 1/65,536 to 1.
        seed: In [0, 2^64).
    """
    # Draws come in blocks of 8 neighbouring tokens, aligned to the start of the document. The blocks of all segments
    # are numbered consecutively; adding the shift of its segment gives a block's number in its document.
    first_blocks_n = segments.starts_n // _BLOCK_TOKENS
    blocks_n = -(-(segments.starts_n + segments.lengths_n) // _BLOCK_TOKENS) - first_blocks_n
    block_ends_n = np.cumsum(blocks_n)
    segment_of_block = np.repeat(np.arange(len(segments)), blocks_n)
    block_shift_n = first_blocks_n - (block_ends_n - blocks_n)
    draws_b8 = draw_words(
        RandomStream.SELECTION,
        seed=seed,
        epoch=segments.epochs_n[segment_of_block],
        item=segments.documents_n[segment_of_block],
        index=np.arange(len(segment_of_block)) + block_shift_n[segment_of_block],
    ).view(np.uint16)

    # The first and last block of a segment also have draws for tokens before and after it, which must not count.
    selected_b8 = draws_b8 < round(mask_prob * _LEVELS)
    index_in_block = np.arange(_BLOCK_TOKENS)
    head_n = segments.starts_n % _BLOCK_TOKENS
    tail_n = (segments.starts_n + segments.lengths_n - 1) % _BLOCK_TOKENS
    selected_b8[block_ends_n - blocks_n] &= index_in_block >= head_n[:, None]
    selected_b8[block_ends_n - 1] &= index_in_block <= tail_n[:, None]
    draw_indices_m = np.flatnonzero(selected_b8)

    # Within a segment, the index of a draw and the position of its token differ by a constant.
    shift_n = positions_n - segments.starts_n + block_shift_n * _BLOCK_TOKENS
    segment_m = segment_of_block[draw_indices_m // _BLOCK_TOKENS]
    positions_m = draw_indices_m + shift_n[segment_m]
    labels_m = tokens_t[positions_m]
    ordinary_m = ~ids.is_special_v[labels_m]
    if not ordinary_m.all():
        draw_indices_m, segment_m = draw_indices_m[ordinary_m], segment_m[ordinary_m]
        positions_m, labels_m = positions_m[ordinary_m], labels_m[ordinary_m]

    replacements_m = np.full(len(labels_m), ids.mask)
    if mask_replacement == "bert":
        # A selected token's draw is uniform below the selection threshold, so it also decides the replacement.
        draws_m = draws_b8.reshape(-1)[draw_indices_m]
        mask_limit = round(mask_prob * _MASK_SHARE * _LEVELS)
        random_limit = round(mask_prob * (_MASK_SHARE + _RANDOM_SHARE) * _LEVELS)
        unchanged_m = draws_m >= random_limit
        replacements_m[unchanged_m] = labels_m[unchanged_m]
        random_r = np.flatnonzero((draws_m >= mask_limit) & ~unchanged_m)
        segments_r = segments[segment_m[random_r]]
        # Uniform over all ids that are not special.
        words_r4 = draw_words(
            RandomStream.REPLACEMENT,
            seed=seed,
            epoch=segments_r.epochs_n,
            item=segments_r.documents_n,
            index=positions_m[random_r] - positions_n[segment_m[random_r]] + segments_r.starts_n,
        )
        choice_r = (words_r4[:, 0].astype(np.uint64) * np.uint64(len(ids.ordinary))) >> np.uint64(32)
        replacements_m[random_r] = ids.ordinary[choice_r.astype(np.int64)]
    return MaskedTokens(positions_m, labels_m, replacements_m)
