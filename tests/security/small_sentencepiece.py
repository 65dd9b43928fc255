"""Write a tiny SentencePiece model, valid or changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL, _UNIGRAM = 1, 2, 3, 1


def write_model(path: Path, *, change: Callable[[Any], object] = lambda model: None, tail: bytes = b"") -> Path:
    """Write a Unigram model whose last piece is "c", after a change, and append `tail` to the file."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto()
    for text, kind in (("<unk>", _UNKNOWN), ("<s>", _CONTROL), ("</s>", _CONTROL)):
        model.pieces.add(piece=text, score=0.0, type=kind)
    for text in ("\u2581", "a", "b", "ab", "c"):
        model.pieces.add(piece=text, score=-1.0, type=_NORMAL)
    model.trainer_spec.model_type = _UNIGRAM
    model.normalizer_spec.add_dummy_prefix = True
    change(model)
    path.write_bytes(model.SerializeToString() + tail)
    return path
