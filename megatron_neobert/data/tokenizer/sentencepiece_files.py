"""Read SentencePiece models (BPE and Unigram) as back ends of the `tokenizers` library.

The ids equal SentencePiece's, with four exceptions:

- The text of a special token stays text, even if the model declares the token user-defined.
- A text that consists of one user-defined symbol gets no space in front.
- With normalisation rules (NFKC), several code points that form one character may give other ids: a letter with two
  accents, or Korean letters.
- If two segmentations of a word are equally likely to seven digits, a Unigram model may choose the other one, because
  SentencePiece sums in 32 bits.
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

_SPACE = "▁"  # SentencePiece's character for a space
# Characters. SentencePiece's default is 16. The limit bounds the time of _build_bpe, which tries all splits of a piece.
_LONGEST_PIECE = 2048
_FIRST_STAND_IN = 0x10F000  # in the last plane for private use

# Values of sentencepiece_model.proto, whose module is imported only to read a model.
_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType; 3 and 4 are whole words and single characters
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # ModelProto.SentencePiece.Type


def read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Read a model file, and return its back end and its special tokens, such as {"cls": "<s>"}.

    Special tokens that the model lacks are appended to its vocabulary under RoBERTa's names. Raise DataError if the
    model file or tokenizer_config.json is damaged, or the model is not supported.
    """
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    content = read_whole(path)
    try:
        model = ModelProto.FromString(content)
    except Exception as error:  # protobuf's DecodeError
        raise DataError(f"{path}: not a SentencePiece model, or truncated; fetch the file again") from error
    if (problem := _find_problem(model)) is not None:
        raise DataError(f"{path}: {problem}")
    # SentencePiece splits a text at these symbols, the longest first. A symbol with a space never occurs in a text.
    user_defined = (entry.piece for entry in model.pieces if entry.type == _USER_DEFINED and " " not in entry.piece)
    symbols = sorted(user_defined, key=len, reverse=True)
    spec = model.trainer_spec
    steps: list[Any] = [decoders.Replace(_SPACE, " ")]
    if spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    try:
        backend = tokenizers.Tokenizer(_build_bpe(model) if spec.model_type == _BPE else _build_unigram(model))
        backend.normalizer = normalizers.Sequence(_normalization(model.normalizer_spec, symbols))
        backend.decoder = decoders.Sequence(steps)
    except BaseException as error:
        raise_unless_library(error)
        raise DataError(f"{path}: the tokenizers library cannot load it ({error}); fetch the file again") from error
    model_names = {"cls": spec.bos_piece, "sep": spec.eos_piece, "pad": spec.pad_piece, "unk": _unknown_piece(model)}
    # Besides tokenizer_config.json: BERT's name, the model's or RoBERTa's.
    candidates = {
        role: (bert, model_names.get(role, roberta), roberta) for role, (bert, roberta) in STANDARD_NAMES.items()
    }
    names, _ = choose_special_names({entry.piece for entry in model.pieces}, path.parent, candidates)
    # In the order of the vocabulary, then of these roles: new tokens get the next ids.
    declared_special = [
        entry.piece for entry in model.pieces if entry.type == _CONTROL or entry.piece in names.values()
    ]
    backend.add_special_tokens([*declared_special, *(names[role] for role in ("cls", "pad", "sep", "unk", "mask"))])
    # Matched in the normalised text, so that only the beginning of the text gets a space, not the text after a symbol.
    ordinary = (text for text in symbols if text not in declared_special)
    backend.add_tokens([AddedToken(text, normalized=True, special=False) for text in ordinary])
    return backend, names


def _unknown_piece(model: Any) -> str:
    return next(entry.piece for entry in model.pieces if entry.type == _UNKNOWN)


def _normalization(spec: Any, symbols: list[str]) -> list[Any]:
    """Return normalizers for SentencePiece's steps, in order. `symbols` stay unchanged. Only " " is white space."""
    before_prefix: list[Any] = []
    if spec.precompiled_charsmap:
        before_prefix.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        before_prefix += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    after_prefix: list[Any] = [normalizers.Replace(" ", _SPACE)]
    # Removing trailing spaces comes last, because it also removes "▁" at the end of the text.
    if spec.remove_extra_whitespaces:
        after_prefix.append(normalizers.Replace(Regex(rf"{_SPACE}+\z"), ""))
    # User-defined symbols are not normalised. Private-use characters stand in for the symbols that would change.
    normalizer = normalizers.Sequence([*before_prefix, *after_prefix])
    hidden = [text for text in symbols if normalizer.normalize_str(text) != text]
    stand_ins = {text: chr(_FIRST_STAND_IN + number) for number, text in enumerate(hidden)}
    prefix: list[Any] = []
    if spec.add_dummy_prefix and not symbols:
        prefix = [normalizers.Prepend(_SPACE)]
    elif spec.add_dummy_prefix:
        # A symbol alone gets no space, because the back end also normalises the texts of its added tokens.
        alternatives = "|".join(re.escape(stand_ins.get(text, text)) for text in symbols)
        prefix = [normalizers.Replace(Regex(rf"\A(?!\z|(?:{alternatives})\z)"), _SPACE)]
    return [
        *(normalizers.Replace(text, stand_in) for text, stand_in in stand_ins.items()),
        *before_prefix,
        *prefix,
        *after_prefix,
        *(normalizers.Replace(stand_in, text) for text, stand_in in stand_ins.items()),
    ]


def _build_bpe(model: Any) -> models.BPE:
    """Return the BPE model. Two ordinary pieces merge if they form a third piece. Higher-scored results merge first.

    For equal scores, SentencePiece merges from left to right. Sorting the longer left part first has this effect.
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
        unk_token=_unknown_piece(model),
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _build_unigram(model: Any) -> models.Unigram:
    """Return the Unigram model. Non-ordinary pieces get a very low score, so that no text is encoded with them."""
    lowest = 100 * min(-1.0, *(entry.score for entry in model.pieces))
    # Nine digits represent a 32-bit number exactly. The reader of a tokenizer.json may round the seventeenth digit.
    scored = [(entry.piece, float(f"{entry.score if entry.type == _NORMAL else lowest:.9g}")) for entry in model.pieces]
    unknown_id = [entry.type for entry in model.pieces].index(_UNKNOWN)
    return models.Unigram(scored, unk_id=unknown_id, byte_fallback=model.trainer_spec.byte_fallback)


def _find_problem(model: Any) -> str | None:
    """Return why the model is damaged or not supported, and what to do, or None if the model can be used."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    texts = [entry.piece for entry in model.pieces]
    # protobuf returns bytes for a text that is not UTF-8.
    names = (*texts, trainer.bos_piece, trainer.eos_piece, trainer.pad_piece)
    if not texts or not all(isinstance(text, str) for text in names) or "" in texts:
        return "not a SentencePiece model, or truncated; fetch the file again"
    if not trainer.ByteSize():
        return "the training settings are missing, so the file may be truncated; fetch the file again"
    types = Counter(entry.type for entry in model.pieces)
    text, count = Counter(texts).most_common(1)[0]
    if count > 1:
        return f"the piece '{text}' occurs {count} times, but each piece has one id; fetch the file again"
    if types[_UNKNOWN] != 1:
        return f"{types[_UNKNOWN]} of {len(texts)} pieces are the unknown token, not 1; fetch the file again"
    if trainer.model_type not in (_BPE, _UNIGRAM):
        return f"model type {trainer.model_type} (words or characters) is not supported; train a BPE or Unigram model"
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        return "spaces at the end of pieces, or not escaped, are not supported; train with SentencePiece's defaults"
    if normalizer.precompiled_charsmap and not is_character_map(normalizer.precompiled_charsmap):
        return "the normalisation rules are truncated or damaged; fetch the file again"
    longest = max((len(entry.piece) for entry in model.pieces if entry.type == _NORMAL), default=0)
    if longest > _LONGEST_PIECE:
        return f"a piece has {longest:,} characters, more than {_LONGEST_PIECE:,}; train with shorter pieces"
    if not all(math.isfinite(entry.score) for entry in model.pieces):
        return "the score of a piece is not a finite number; fetch the file again"
    if trainer.model_type == _BPE and types[_UNUSED]:
        return f"{types[_UNUSED]} pieces of a BPE model are marked unused, which is not supported; remove them"
    return None
