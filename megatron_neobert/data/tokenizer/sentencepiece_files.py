"""SentencePiece models (BPE and Unigram) as `tokenizers` back ends, read without the sentencepiece package.

Ids equal SentencePiece's own, with four exceptions. Special tokens spelt out in a text stay text, also those that the
model calls user-defined. A text that is nothing but one user-defined symbol gets no space before it. With rules that
normalise characters (NFKC), several code points that make one character, such as a letter with two accents or Korean
letters written apart, may give others. Of two ways to cut a word that are equally likely to seven digits, a Unigram
model may choose another, because SentencePiece adds up in 32 bits.
"""

import math
import re
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from megatron_neobert.data.tokenizer.files import (
    STANDARD_NAMES,
    declared_names,
    is_character_map,
    raise_unless_library,
    read_tokenizer_config,
    read_whole,
)
from megatron_neobert.errors import DataError

_SPACE = "▁"  # what SentencePiece writes for a space
_LONGEST_PIECE = 2048  # characters; SentencePiece's default is 16. Every way to cut one in two is looked at
_FIRST_STAND_IN = 0x10F000  # in the last plane for private use

# Numbers of sentencepiece_model.proto: fields of ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_ROLE_PIECES = {"cls": (46, b"<s>"), "sep": (47, b"</s>"), "pad": (48, b"<pad>")}  # bos_piece, eos_piece, pad_piece
_CHARACTER_MAP, _DUMMY_PREFIX, _REMOVE_EXTRA_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_UNIGRAM, _BPE = 1, 2  # ModelType; 3 and 4 are whole words and single characters
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # Type of a piece

Fields = dict[int, list[Any]]  # of a message, by number: integers, or bytes
Value = TypeVar("Value", int, bytes)


class Piece(NamedTuple):
    """One entry of the vocabulary; its place is its id."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a model file that decide ids."""

    pieces: list[Piece]
    model_type: int
    byte_fallback: bool
    character_map: bytes  # SentencePiece's compiled normalisation rules; empty: none
    dummy_prefix: bool
    remove_extra_spaces: bool
    role_pieces: dict[str, str]  # what the model calls each role's token, known or not

    @property
    def user_defined(self) -> list[str]:
        """Symbols that are cut out of any text, longest first. One with a space in it is never found in a text."""
        texts = (piece.text for piece in self.pieces if piece.type == _USER_DEFINED and " " not in piece.text)
        return sorted(texts, key=len, reverse=True)


def read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The back end of a model file and the name of each special token ("cls" -> "<s>").

    Roles that the model has no piece for get one after its vocabulary, in RoBERTa's spelling.

    Raises:
        DataError: The file is not a SentencePiece model, or one of a kind that cannot be represented.
    """
    model = _read_model(path)
    try:
        backend = _build_backend(model)
    except BaseException as error:
        raise_unless_library(error)
        raise DataError(f"{path}: the tokenizers library refuses it ({error}); fetch it again") from error
    names = _choose_names(model, declared_names(read_tokenizer_config(path.parent), path.parent))
    # In the order of the vocabulary, then of these roles: what is new gets the next id.
    declared_special = [piece.text for piece in model.pieces if piece.type == _CONTROL or piece.text in names.values()]
    backend.add_special_tokens([*declared_special, *(names[role] for role in ("cls", "pad", "sep", "unk", "mask"))])
    # Looked for in the normalised text, so that the space at the beginning comes once and not after each of them.
    ordinary = (text for text in model.user_defined if text not in declared_special)
    backend.add_tokens([AddedToken(text, normalized=True, special=False) for text in ordinary])
    return backend, names


def _choose_names(model: SentencePieceModel, declared: dict[str, str]) -> dict[str, str]:
    """Each role's declared name if there is one, else the first of the usual names that the model knows."""
    known = {piece.text: piece.type for piece in model.pieces}
    names = {}
    for role, (bert, roberta) in STANDARD_NAMES.items():
        usual = [bert, model.role_pieces[role], roberta]
        names[role] = declared.get(role) or next((name for name in usual if name in known), roberta)
    return names


def _build_backend(model: SentencePieceModel) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(_build_bpe(model) if model.model_type == _BPE else _build_unigram(model))
    backend.normalizer = normalizers.Sequence(_normalization(model))
    steps: list[Any] = [decoders.Replace(_SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _normalization(model: SentencePieceModel) -> list[Any]:
    """SentencePiece's normaliser in its own order; it knows no white space but the space."""
    before: list[Any] = []
    if model.character_map:
        before.append(normalizers.Precompiled(model.character_map))
    if model.remove_extra_spaces:
        before += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    after: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if model.remove_extra_spaces:  # last, because it removes a "▁" of the text as well
        after.append(normalizers.Replace(Regex(rf"{_SPACE}+\z"), ""))
    # User-defined symbols are not normalised: those that would change hide behind characters that nobody uses.
    changed = normalizers.Sequence([*before, *after])
    hidden = [text for text in model.user_defined if changed.normalize_str(text) != text]
    stand_ins = {text: chr(_FIRST_STAND_IN + number) for number, text in enumerate(hidden)}
    return [
        *(normalizers.Replace(text, stand_in) for text, stand_in in stand_ins.items()),
        *before,
        *([_dummy_prefix([stand_ins.get(text, text) for text in model.user_defined])] if model.dummy_prefix else []),
        *after,
        *(normalizers.Replace(stand_in, text) for text, stand_in in stand_ins.items()),
    ]


def _dummy_prefix(symbols: list[str]) -> Any:
    """The space before a text. Not before a symbol alone: the back end normalises the spelling of symbols as well."""
    if not symbols:
        return normalizers.Prepend(_SPACE)
    alternatives = "|".join(re.escape(symbol) for symbol in symbols)
    return normalizers.Replace(Regex(rf"\A(?!\z|(?:{alternatives})\z)"), _SPACE)


def _build_bpe(model: SentencePieceModel) -> models.BPE:
    """The merges are every way to join two pieces to a third, best score of the result first.

    Where scores are equal, SentencePiece joins from left to right; the longer left part first has this effect.
    """
    vocabulary = {piece.text: id_ for id_, piece in enumerate(model.pieces)}
    joinable = {piece.text for piece in model.pieces if piece.type == _NORMAL}
    merges = []
    for text, score, type_ in model.pieces:
        if type_ == _NORMAL:
            for cut in range(1, len(text)):
                left, right = text[:cut], text[cut:]
                if left in joinable and right in joinable:
                    merges.append((-score, -cut, -len(right), left, right))
    merges.sort()
    return models.BPE(
        vocab=vocabulary,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=next(piece.text for piece in model.pieces if piece.type == _UNKNOWN),
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _build_unigram(model: SentencePieceModel) -> models.Unigram:
    """Only ordinary pieces keep their score: the others are not to be found in a text, however they are spelt."""
    hidden = 100 * min(-1.0, *(piece.score for piece in model.pieces))
    # Nine digits name a 32-bit number, and survive a tokenizer.json, whose reader may err in the seventeenth.
    scored = [(piece.text, float(f"{piece.score if piece.type == _NORMAL else hidden:.9g}")) for piece in model.pieces]
    unknown = next(id_ for id_, piece in enumerate(model.pieces) if piece.type == _UNKNOWN)
    return models.Unigram(scored, unk_id=unknown, byte_fallback=model.byte_fallback)


def _read_model(path: Path) -> SentencePieceModel:
    try:
        fields = _read_message(read_whole(path))
        trainer = _read_message(_last(fields, _TRAINER, b""))
        normalizer = _read_message(_last(fields, _NORMALIZER, b""))
        pieces = [_read_piece(content) for content in fields[_PIECES]]
        role_pieces = {role: _last(trainer, number, name).decode() for role, (number, name) in _ROLE_PIECES.items()}
        role_pieces["unk"] = next((piece.text for piece in pieces if piece.type == _UNKNOWN), "")
        role_pieces["mask"] = STANDARD_NAMES["mask"][1]
        model = SentencePieceModel(
            pieces=pieces,
            model_type=_last(trainer, _MODEL_TYPE, _UNIGRAM),
            byte_fallback=bool(_last(trainer, _BYTE_FALLBACK, 0)),
            character_map=_last(normalizer, _CHARACTER_MAP, b""),
            dummy_prefix=bool(_last(normalizer, _DUMMY_PREFIX, 1)),
            remove_extra_spaces=bool(_last(normalizer, _REMOVE_EXTRA_SPACES, 1)),
            role_pieces=role_pieces,
        )
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise DataError(f"{path}: not a SentencePiece model, or cut off; fetch it again") from error
    problem = _find_problem(model, trainer, normalizer)
    if problem is not None:
        raise DataError(f"{path}: {problem}")
    return model


def _find_problem(model: SentencePieceModel, trainer: Fields, normalizer: Fields) -> str | None:
    if not trainer:
        return "the settings are missing: cut off? Fetch it again"
    types = Counter(piece.type for piece in model.pieces)
    duplicate = next((text for text, count in Counter(piece.text for piece in model.pieces).items() if count > 1), None)
    if duplicate is not None:
        return f"the piece '{duplicate}' occurs twice; every piece needs its own id"
    if types[_UNKNOWN] != 1:
        return f"{types[_UNKNOWN]} of {len(model.pieces)} pieces stand for unknown text; there must be one"
    if model.model_type not in (_BPE, _UNIGRAM):
        return (
            f"model type {model.model_type} (whole words or characters) is not supported; train a BPE or Unigram model"
        )
    if _last(trainer, _SPACE_AS_SUFFIX, 0) or not _last(normalizer, _ESCAPE_SPACES, 1):
        return "spaces at the end of pieces, or not escaped, are not supported; train with SentencePiece's defaults"
    if model.character_map and not is_character_map(model.character_map):
        return "the normalisation rules are cut off or damaged; fetch it again"
    longest = max(len(piece.text) for piece in model.pieces if piece.type == _NORMAL) if types[_NORMAL] else 0
    if longest > _LONGEST_PIECE:
        return f"a piece has {longest:,} characters, more than {_LONGEST_PIECE:,}; train with shorter ones"
    if not all(math.isfinite(piece.score) for piece in model.pieces):
        return "a score of a piece is not a finite number; fetch it again"
    if model.model_type == _BPE and types[_UNUSED]:
        return f"{types[_UNUSED]} pieces of a BPE model are marked unused, which is not supported; remove them"
    return None


def _read_piece(content: Any) -> Piece:
    if not isinstance(content, bytes):
        raise ValueError(f"a piece is {content!r}")
    fields = _read_message(content)
    (score,) = struct.unpack("<f", _last(fields, _SCORE, b"\0\0\0\0"))
    return Piece(_last(fields, _TEXT, b"").decode(), score, _last(fields, _TYPE, _NORMAL))


def _last(fields: Fields, number: int, default: Value) -> Value:
    """The value of a field; the last one counts where it is repeated. ValueError if it is of another kind."""
    if number not in fields:
        return default
    value = fields[number][-1]
    if not isinstance(value, type(default)):
        raise ValueError(f"field {number} holds {value!r}")
    return value


def _read_message(data: bytes) -> Fields:
    """The fields of a protocol buffer message by number; IndexError or ValueError if it is none."""
    fields: Fields = {}
    at, end = 0, len(data)
    while at < end:
        key, at = _read_varint(data, at)
        number, wire_type = key >> 3, key & 7
        value: Any
        if wire_type == 0:
            value, at = _read_varint(data, at)
        else:
            if wire_type == 2:
                length, at = _read_varint(data, at)
            else:
                length = {1: 8, 5: 4}[wire_type]
            value = data[at : at + length]
            at += length
        fields.setdefault(number, []).append(value)
    if at > end:
        raise IndexError(f"field {number} ends {at - end} bytes behind the message")
    return fields


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    value, shift = byte & 127, 7
    while byte & 128:
        if shift > 63:
            raise ValueError("a number of more than ten bytes")
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        shift += 7
    return value, at + 1
