"""Does a fast back end give the ids of the reference? Strings made to find a difference, and the comparison itself.

The strings are the same in every process: characters of every Unicode block, the places where normalisers and
pre-tokenisers disagree (accents, zero-width characters, white space, overlong words), pieces of the vocabulary at
hand, its special tokens spelt out, and mixtures of all that. Encoding them takes the reference about 0.1 seconds.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.tokenizer.tokenizer import EncodedBatch, Tokenizer

EncodeTexts = Callable[[Sequence[str]], EncodedBatch]

_SEED = 20_240_229
_DENSE_END = 0x3000  # below: alphabets, marks, symbols; every code point is tried
_BLOCK = 128  # code points; blocks of Unicode start at multiples of 16, few are smaller than this
_SAMPLE = 16  # code points of each block above _DENSE_END
_PLANES = ((_DENSE_END, 0xD800), (0xE000, 0x33480), (0xE0000, 0xE0200), (0x10FF80, 0x110000))  # no surrogates
_MIXTURES = 700
_VOCABULARY_STRINGS = 200
_SHOWN_IDS = 8

_WORDS = (
    "hello", "Führer", "naïve", "İstanbul", "ſtraße", "ΑΣ", "ὈΔΥΣΣΕΎΣ", "e\u0301", "A\u030a\u0327", "ﬁnance", "Ａｂｃ",
    "東京", "한국어", "\u1112\u1161\u11ab", "ไทย", "नमस्ते", "العربية", "עִבְרִית", "Ελληνικά", "русский", "ЁЖ", "𝔘𝔫𝔦",
    "👍🏽", "👩\u200d👩\u200d👧", "🇩🇪", "☃\ufe0f", "1,000.50", "-3.14e-10", "0x1F", "٣٫١٤", "１２", "H₂O", "x²", "½",
    "https://example.org/a?b=c&d=%20#e", "user@example.com", "C++", "don't", "it’s", "rock-'n'-roll", "e.g.", "#tag",
    "$5", "a_b", "##ing", "▁", "▁the", "Ġthe", "Ċ", "<0x0A>", "<|endoftext|>", "[unused1]", "…", "—", "«x»", "``", "''",
    "ⅷ", "𠀀𪛖",
)  # fmt: skip
_SPACES = (
    " ", "  ", "    ", "\n", "\r\n", "\r", "\t", "\v", "\f", "\x1c", "\x85", "\xa0", "\u1680", "\u2002", "\u2009",
    "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u180e",
)  # fmt: skip
_INVISIBLE = tuple(
    "\0\x01\x7f\x9f\xad\u034f\u061c\u200b\u200c\u200d\u200e\u200f\u202e\u2060\u2066\ufeff\ufffc\ufffd\ufffe\ufdd0"
    "\U0001fffe\U000e0001\U0010ffff\ue000"
)


def find_mismatch(tokenizer: Tokenizer, encode: EncodeTexts) -> str | None:
    """The first difference between a back end and the reference on the probe's strings, as a sentence; None if alike.

    Everything is encoded twice: fast back ends remember words, and what they remember must be right as well.
    """
    texts = probe_strings(tokenizer)
    expected = tokenizer.encode_batch(texts)
    for _ in range(2):
        difference = describe_difference(tokenizer, texts, encode(texts), expected)
        if difference is not None:
            return difference
    return None


def describe_difference(
    tokenizer: Tokenizer, texts: Sequence[str], found: EncodedBatch, expected: EncodedBatch
) -> str | None:
    """Which of the texts was encoded otherwise, where, and both ids; None where everything is equal."""
    if np.array_equal(found.lengths, expected.lengths) and np.array_equal(found.ids, expected.ids):
        return None
    if len(found.lengths) != len(texts):
        return f"{len(texts):,} texts give {len(found.lengths):,} lists of ids"
    for number, ids, reference_ids in zip(range(len(texts)), _rows(found), _rows(expected), strict=False):
        if not np.array_equal(ids, reference_ids):
            return _describe_row(tokenizer, texts[number], ids, reference_ids)
    return f"{int(found.lengths.sum()):,} ids were announced and {len(found.ids):,} given"


def probe_strings(tokenizer: Tokenizer) -> list[str]:
    """About 3,000 valid Unicode strings for this tokenizer, always the same."""
    generator = np.random.default_rng(_SEED)
    blocks = _block_strings(generator)
    literals = _literals(tokenizer)
    fixed = [*_fixed_strings(), *literals, *(f"a{literal}b {literal}, {literal.lower()}" for literal in literals)]
    pieces = _vocabulary_pieces(tokenizer, generator)
    drawn = generator.integers(0, len(pieces), (_VOCABULARY_STRINGS, 12))
    vocabulary = [(" " if number % 2 else "").join(pieces[i] for i in row) for number, row in enumerate(drawn)]
    return [*fixed, *blocks, *vocabulary, *_mixtures(literals, generator)]


def _block_strings(generator: np.random.Generator) -> list[str]:
    """Code points one after the other, between letters, and after spaces, so that each meets each kind of neighbour."""
    runs = [np.arange(start, start + 32) for start in range(0, _DENSE_END, 32)]
    for first, last in _PLANES:
        starts = np.arange(first, last, _BLOCK)
        runs += list(starts[:, None] + generator.integers(0, _BLOCK, (len(starts), _SAMPLE)))
    joiners = ("", "a", " ", " x")
    return [joiners[number % 4].join(map(chr, run.tolist())) for number, run in enumerate(runs)]


def _fixed_strings() -> list[str]:
    around = [f"a{text}b {text} c{text}" for text in (*_WORDS, *_SPACES, *_INVISIBLE)]
    alone = ["", *_WORDS, *_SPACES, *_INVISIBLE]
    # WordPiece gives up on a word of more than 100 characters, counted after some normalisation and before other.
    long_words = [
        unit * count for unit in ("a", "é", "e\u0301", "字", "ﬁ", "👍", "ab1") for count in (50, 99, 100, 101, 300)
    ]
    return [*alone, *around, *long_words, *(f"x {word}. y" for word in long_words)]


def _literals(tokenizer: Tokenizer) -> list[str]:
    declared = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()][:50]
    standard = ["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]", "<s>", "</s>", "<pad>", "<mask>", "<unk>"]
    return list(dict.fromkeys([*tokenizer.special_names.values(), *declared, *standard]))


def _vocabulary_pieces(tokenizer: Tokenizer, generator: np.random.Generator) -> list[str]:
    ids = generator.integers(0, tokenizer.vocab_size, 1000).tolist()
    pieces = [tokenizer.backend.id_to_token(id_) for id_ in ids]
    return [piece.removeprefix("##").replace("▁", " ").replace("Ġ", " ") for piece in pieces if piece is not None]


def _mixtures(literals: Sequence[str], generator: np.random.Generator) -> list[str]:
    parts = [*_WORDS, *_INVISIBLE, *literals, *(" " for _ in range(60)), *_SPACES, *"aeinrst.,!?()[]\"'-/0123456789"]
    planes = [chr(code) for code in generator.integers(0x21, 0x30000, 200) if not 0xD800 <= code < 0xE000]
    parts += planes
    counts = generator.integers(1, 40, _MIXTURES)
    return ["".join(parts[number] for number in generator.integers(0, len(parts), count)) for count in counts]


def _rows(batch: EncodedBatch) -> list[NDArray[np.integer]]:
    return np.split(batch.ids, np.cumsum(batch.lengths)[:-1])


def _describe_row(tokenizer: Tokenizer, text: str, ids: NDArray[np.integer], expected: NDArray[np.integer]) -> str:
    shorter = min(len(ids), len(expected))
    different = np.flatnonzero(ids[:shorter] != expected[:shorter])
    first = int(different[0]) if len(different) else shorter
    offsets = tokenizer.backend.encode(text, add_special_tokens=False).offsets
    place = offsets[first][0] if first < len(offsets) else len(text)
    excerpt = text[max(0, place - 30) : place + 30]
    shown, wanted = (array[first : first + _SHOWN_IDS].tolist() for array in (ids, expected))
    return f"at token {first:,}, near {excerpt!r}, it gives {shown} and the reference {wanted}"
