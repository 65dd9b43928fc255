"""Weights for another vocabulary, from which training continues.

A token of the new vocabulary that the old one has, with the same text at the same place in a word, keeps its row of the
embedding, of the decoder and of the decoder's bias. Any other token starts with the mean of the rows of the old tokens
into which its text is divided. Special tokens keep the rows of their roles.

Source: the initialization by means is that of FVT (arXiv 2402.09977).
"""

import json
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from torch import Tensor

from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.text import parse_json

_WORD_MARK = "▁"  # of SentencePiece and Metaspace


@dataclass(frozen=True)
class VocabularyMap:
    """Old tokens of each new token."""

    old_ids: list[list[int]]  # averaged; empty if the old vocabulary does not have the text: the mean of all rows
    copied: int  # tokens of both vocabularies, special ones included

    @property
    def unknown(self) -> int:
        """Number of tokens that start as the mean of all rows."""
        return sum(not ids for ids in self.old_ids)

    @property
    def note(self) -> str:
        """A sentence with the number of tokens of each kind."""
        divided = len(self.old_ids) - self.copied - self.unknown
        return (
            f"new vocabulary of {len(self.old_ids):,} tokens: {self.copied:,} have the weights of the same token, "
            f"{divided:,} the mean of the tokens of their text, {self.unknown:,} the mean of all tokens"
        )

    def apply(self, rows: Tensor) -> Tensor:
        """Return a row of the new vocabulary per token, from one row of the old one per token, [tokens, ...]."""
        mean_of_all = rows.float().mean(0)
        means = [rows[ids].float().mean(0) if ids else mean_of_all for ids in self.old_ids]
        return torch.stack(means).to(rows.dtype)


def map_vocabulary(old: Tokenizer, new: Tokenizer) -> VocabularyMap:
    """Return the old tokens of each new token."""
    known = {surface: token for token, surface in enumerate(_surfaces(old.backend)) if token not in old.special_ids}
    roles = {token: old.special_tokens[role] for role, token in new.special_tokens.items()}
    surfaces = _surfaces(new.backend)
    # A word-piece tokenizer divides words, so it needs no space before the text.
    texts = [f" {text}" if begins_word else text for text, begins_word in surfaces]
    encoded = old.encode_batch(texts)
    old_ids, at, copied = [], 0, 0
    for token, (surface, length) in enumerate(zip(surfaces, encoded.lengths.tolist(), strict=True)):
        ids = [number for number in encoded.ids[at : at + length].tolist() if number != old.unk_id]
        at += length
        same = roles.get(token, known.get(surface))
        copied += same is not None
        old_ids.append(ids if same is None else [same])
    return VocabularyMap(old_ids, copied)


def _surfaces(backend: Backend) -> list[tuple[str, bool]]:
    """Return the text of each token, and whether it begins a word."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    state = parse_json(backend.to_str())
    prefix = state["model"].get("continuing_subword_prefix") if state["model"]["type"] == "WordPiece" else None
    is_byte_level = '"ByteLevel"' in json.dumps(state["pre_tokenizer"])
    surfaces = []
    for token in sorted(vocabulary, key=vocabulary.__getitem__):
        if prefix is not None:
            surfaces.append((token.removeprefix(prefix), not token.startswith(prefix)))
            continue
        text = decoders.ByteLevel().decode([token]) if is_byte_level else token.replace(_WORD_MARK, " ")
        surfaces.append((text.removeprefix(" "), text.startswith(" ")))
    return surfaces
