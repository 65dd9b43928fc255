"""A tiny SentencePiece model, written field by field, and ways to spoil it."""

import struct
from pathlib import Path

_UNKNOWN, _CONTROL = 2, 3


def varint(value: int) -> bytes:
    content = bytearray()
    while value > 127:
        content.append(value & 127 | 128)
        value >>= 7
    return bytes([*content, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def piece(text: str, score: float = -1.0, kind: int = 1) -> bytes:
    return message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind)


def write_model(
    path: Path,
    *,
    score: float = -1.0,
    letter: str = "c",
    rules: bytes = b"",
    model_type: int = 1,
    unknowns: int = 1,
    twice: bool = False,
    tail: bytes = b"",
) -> Path:
    """A Unigram model of a few letters. `letter` and `score` are those of one of them; `tail` ends the file."""
    pieces = [piece(f"<unk{n}>" if n else "<unk>", 0.0, _UNKNOWN) for n in range(unknowns)]
    pieces += [piece(name, 0.0, _CONTROL) for name in ("<s>", "</s>")]
    pieces += [piece(letter) for letter in ("\u2581", "a", "b", "ab")] + [piece(letter, score)]
    pieces += [piece("a")] if twice else []
    content = b"".join(message(1, entry) for entry in pieces)
    content += message(2, number(3, model_type))
    content += message(3, message(2, rules) if rules else number(3, 1))
    path.write_bytes(content + tail)
    return path
