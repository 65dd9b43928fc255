"""SentencePiece models (BPE and Unigram) as `tokenizers` back ends; the file is parsed by sentencepiece's own protobuf.

Ids equal SentencePiece's own, with four exceptions. Special tokens spelt out in a text stay text, also those that the
model calls user-defined. A text that is nothing but one user-defined symbol gets no space before it. With rules that
normalise characters (NFKC), several code points that make one character, such as a letter with two accents or Korean
letters written apart, may give others. Of two ways to cut a word that are equally likely to seven digits, a Unigram
model may choose another, because SentencePiece adds up in 32 bits.
"""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from megatron_neobert.data.tokenizer.files import (
    STANDARD_NAMES,
    choose_special_names,
    is_character_map,
    raise_unless_library,
    read_whole,
)
from megatron_neobert.errors import DataError

_SPACE = "▁"  # what SentencePiece writes for a space
_LONGEST_PIECE = 2048  # characters; SentencePiece's default is 16. Every way to cut one in two is looked at
_FIRST_STAND_IN = 0x10F000  # in the last plane for private use

# Of sentencepiece_model.proto, whose module is imported only where there is such a model.
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType; 3 and 4 are whole words and single characters
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # ModelProto.SentencePiece.Type


def read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The back end of a model file and the name of each special token ("cls" -> "<s>").

    Roles that the model has no piece for get one after its vocabulary, in RoBERTa's spelling.

    Raises:
        DataError: The file is not a SentencePiece model, or one of a kind that cannot be represented.
        ModuleNotFoundError: The package sentencepiece, or protobuf, is not installed.
    """
    model = _read_model(path)
    # Cut out of any text, longest first. One with a space in it is never found in a text.
    user_defined = (entry.piece for entry in model.pieces if entry.type == _USER_DEFINED and " " not in entry.piece)
    symbols = sorted(user_defined, key=len, reverse=True)
    try:
        backend = _build_backend(model, symbols)
    except BaseException as error:
        raise_unless_library(error)
        raise DataError(f"{path}: the tokenizers library refuses it ({error}); fetch it again") from error
    names = _choose_names(model, path.parent)
    # In the order of the vocabulary, then of these roles: what is new gets the next id.
    declared_special = [
        entry.piece for entry in model.pieces if entry.type == _CONTROL or entry.piece in names.values()
    ]
    backend.add_special_tokens([*declared_special, *(names[role] for role in ("cls", "pad", "sep", "unk", "mask"))])
    # Looked for in the normalised text, so that the space at the beginning comes once and not after each of them.
    ordinary = (text for text in symbols if text not in declared_special)
    backend.add_tokens([AddedToken(text, normalized=True, special=False) for text in ordinary])
    return backend, names


def _choose_names(model: Any, folder: Path) -> dict[str, str]:
    """Return the name of each role's token: declared, BERT's, the model's own, or RoBERTa's."""
    spec = model.trainer_spec
    own = {"cls": spec.bos_piece, "sep": spec.eos_piece, "pad": spec.pad_piece}
    own["unk"] = next(entry.piece for entry in model.pieces if entry.type == _UNKNOWN)
    usual = {role: (bert, own.get(role, roberta), roberta) for role, (bert, roberta) in STANDARD_NAMES.items()}
    return choose_special_names({entry.piece for entry in model.pieces}, folder, usual)[0]


def _build_backend(model: Any, symbols: list[str]) -> tokenizers.Tokenizer:
    spec = model.trainer_spec
    backend = tokenizers.Tokenizer(_build_bpe(model) if spec.model_type == _BPE else _build_unigram(model))
    backend.normalizer = normalizers.Sequence(_normalization(model.normalizer_spec, symbols))
    steps: list[Any] = [decoders.Replace(_SPACE, " ")]
    if spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _normalization(spec: Any, symbols: list[str]) -> list[Any]:
    """SentencePiece's normaliser in its own order; it knows no white space but the space."""
    before: list[Any] = []
    if spec.precompiled_charsmap:
        before.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        before += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    after: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if spec.remove_extra_whitespaces:  # last, because it removes a "▁" of the text as well
        after.append(normalizers.Replace(Regex(rf"{_SPACE}+\z"), ""))
    # User-defined symbols are not normalised: those that would change hide behind characters that nobody uses.
    changed = normalizers.Sequence([*before, *after])
    hidden = [text for text in symbols if changed.normalize_str(text) != text]
    stand_ins = {text: chr(_FIRST_STAND_IN + number) for number, text in enumerate(hidden)}
    return [
        *(normalizers.Replace(text, stand_in) for text, stand_in in stand_ins.items()),
        *before,
        *([_dummy_prefix([stand_ins.get(text, text) for text in symbols])] if spec.add_dummy_prefix else []),
        *after,
        *(normalizers.Replace(stand_in, text) for text, stand_in in stand_ins.items()),
    ]


def _dummy_prefix(symbols: list[str]) -> Any:
    """The space before a text. Not before a symbol alone: the back end normalises the spelling of symbols as well."""
    if not symbols:
        return normalizers.Prepend(_SPACE)
    alternatives = "|".join(re.escape(symbol) for symbol in symbols)
    return normalizers.Replace(Regex(rf"\A(?!\z|(?:{alternatives})\z)"), _SPACE)


def _build_bpe(model: Any) -> models.BPE:
    """The merges are every way to join two pieces to a third, best score of the result first.

    Where scores are equal, SentencePiece joins from left to right; the longer left part first has this effect.
    """
    vocabulary = {entry.piece: id_ for id_, entry in enumerate(model.pieces)}
    joinable = {entry.piece: entry.score for entry in model.pieces if entry.type == _NORMAL}
    merges = []
    for text, score in joinable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in joinable and right in joinable:
                merges.append((-score, -cut, -len(right), left, right))
    merges.sort()
    return models.BPE(
        vocab=vocabulary,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=next(entry.piece for entry in model.pieces if entry.type == _UNKNOWN),
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _build_unigram(model: Any) -> models.Unigram:
    """Only ordinary pieces keep their score: the others are not to be found in a text, however they are spelt."""
    hidden = 100 * min(-1.0, *(entry.score for entry in model.pieces))
    # Nine digits name a 32-bit number, and survive a tokenizer.json, whose reader may err in the seventeenth.
    scored = [(entry.piece, float(f"{entry.score if entry.type == _NORMAL else hidden:.9g}")) for entry in model.pieces]
    unknown = next(id_ for id_, entry in enumerate(model.pieces) if entry.type == _UNKNOWN)
    return models.Unigram(scored, unk_id=unknown, byte_fallback=model.trainer_spec.byte_fallback)


def _read_model(path: Path) -> Any:
    """The file as sentencepiece's ModelProto, checked for what would make the library fail or give other ids."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    content = read_whole(path)
    try:
        model = ModelProto.FromString(content)
    except Exception as error:  # protobuf's DecodeError, the only one for bytes that are no such message
        raise DataError(f"{path}: not a SentencePiece model, or cut off; fetch it again") from error
    if (problem := _find_problem(model)) is not None:
        raise DataError(f"{path}: {problem}")
    return model


def _find_problem(model: Any) -> str | None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    texts = [entry.piece for entry in model.pieces]
    # protobuf gives bytes where a text is no UTF-8.
    names = (*texts, trainer.bos_piece, trainer.eos_piece, trainer.pad_piece)
    if not texts or not all(isinstance(text, str) for text in names) or "" in texts:
        return "not a SentencePiece model, or cut off; fetch it again"
    if not trainer.ByteSize():
        return "the settings are missing: cut off? Fetch it again"
    types = Counter(entry.type for entry in model.pieces)
    text, count = Counter(texts).most_common(1)[0]
    if count > 1:
        return f"the piece '{text}' occurs twice; every piece needs its own id"
    if types[_UNKNOWN] != 1:
        return f"{types[_UNKNOWN]} of {len(texts)} pieces stand for unknown text; there must be one"
    if trainer.model_type not in (_BPE, _UNIGRAM):
        return (
            f"model type {trainer.model_type} (whole words or characters) is not supported; train a BPE or Unigram "
            "model"
        )
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return "spaces at the end of pieces, or not escaped, are not supported; train with SentencePiece's defaults"
    if normalizer.precompiled_charsmap and not is_character_map(normalizer.precompiled_charsmap):
        return "the normalisation rules are cut off or damaged; fetch it again"
    longest = max((len(entry.piece) for entry in model.pieces if entry.type == _NORMAL), default=0)
    if longest > _LONGEST_PIECE:
        return f"a piece has {longest:,} characters, more than {_LONGEST_PIECE:,}; train with shorter ones"
    if not all(math.isfinite(entry.score) for entry in model.pieces):
        return "a score of a piece is not a finite number; fetch it again"
    if trainer.model_type == _BPE and types[_UNUSED]:
        return f"{types[_UNUSED]} pieces of a BPE model are marked unused, which is not supported; remove them"
    return None
