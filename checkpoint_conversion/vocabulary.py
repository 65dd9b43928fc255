"""Weights for another vocabulary, from which training continues.

A token in both vocabularies keeps its rows of the embedding, the decoder and the decoder's bias. Two tokenizers of one
kind are compared by token strings, others by text and place in a word. Any other token starts with the mean of the rows
of the old tokens into which its text is divided. A token that is a part of a character starts with the mean of all
rows. Special tokens keep the rows of their roles.

Source: the initialization by means follows FVT (arXiv 2402.09977).
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from torch import Tensor

from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.text import parse_json

_WORD_MARK = "▁"  # of SentencePiece and Metaspace
_REPLACEMENT = "\ufffd"  # decoded from bytes that are not a whole character
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte in SentencePiece's vocabularies


@dataclass(frozen=True)
class VocabularyMap:
    """Old tokens from which the weights of each new token are computed."""

    old_ids: list[list[int]]  # averaged; empty if the old vocabulary does not have the text: the mean of all rows
    copied: int  # tokens of both vocabularies, special ones included

    @property
    def unknown(self) -> int:
        """Number of new tokens whose weights start as the mean of all old rows."""
        return sum(not ids for ids in self.old_ids)

    @property
    def note(self) -> str:
        """Sentence for the user that counts the new tokens by the origin of their weights."""
        divided = len(self.old_ids) - self.copied - self.unknown
        return (
            f"new vocabulary of {len(self.old_ids):,} tokens: {self.copied:,} have the weights of the same token, "
            f"{divided:,} the mean of the tokens of their text, {self.unknown:,} the mean of all tokens"
        )

    def apply(self, rows: Tensor) -> Tensor:
        """Compute the new vocabulary's rows, [new tokens, ...], from the old vocabulary's `rows`, [old tokens, ...]."""
        mean_of_all = rows.float().mean(0)
        means = [rows[ids].float().mean(0) if ids else mean_of_all for ids in self.old_ids]
        return torch.stack(means).to(rows.dtype)


def map_vocabulary(old: Tokenizer, new: Tokenizer) -> VocabularyMap:
    """Return the old tokens from which the weights of each new token are computed."""
    # Parts of characters, of which byte-level vocabularies have hundreds, have no text; their token strings differ.
    is_same_kind = _kind(old.backend) == _kind(new.backend)
    name: Callable[[Backend], Sequence[object]] = _token_strings if is_same_kind else _surfaces
    known = {key: token for token, key in enumerate(name(old.backend)) if token not in old.special_ids}
    new_names = name(new.backend)
    roles = {token: old.special_tokens[role] for role, token in new.special_tokens.items()}
    surfaces = _surfaces(new.backend)
    # A word-piece tokenizer divides words, so it needs no space before the text.
    texts = [f" {text}" if begins_word else text for text, begins_word in surfaces]
    encoded = old.encode_batch(texts)
    old_ids, at, copied = [], 0, 0
    for token, (text, length) in enumerate(zip(texts, encoded.lengths.tolist(), strict=True)):
        ids = [number for number in encoded.ids[at : at + length].tolist() if number != old.unk_id]
        at += length
        same = roles.get(token, known.get(new_names[token]))
        copied += same is not None
        is_part = _REPLACEMENT in text or _BYTE.fullmatch(text.strip())
        old_ids.append([same] if same is not None else [] if is_part else ids)
    return VocabularyMap(old_ids, copied)


def _token_strings(backend: Backend) -> list[str]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _kind(backend: Backend) -> tuple[bool, str | None]:
    """Return (True if token strings are bytes, WordPiece's prefix for tokens that continue a word, else None)."""
    state = parse_json(backend.to_str())
    prefix = state["model"].get("continuing_subword_prefix") if state["model"]["type"] == "WordPiece" else None
    return '"ByteLevel"' in json.dumps(state["pre_tokenizer"]), prefix


def _surfaces(backend: Backend) -> list[tuple[str, bool]]:
    """Return (text, True if the token begins a word) for each token."""
    is_byte_level, prefix = _kind(backend)
    surfaces = []
    for token in _token_strings(backend):
        if prefix is not None:
            surfaces.append((token.removeprefix(prefix), not token.startswith(prefix)))
            continue
        text = decoders.ByteLevel().decode([token]) if is_byte_level else token.replace(_WORD_MARK, " ")
        surfaces.append((text.removeprefix(" "), text.startswith(" ")))
    return surfaces
