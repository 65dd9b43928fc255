"""Encode with a fast back end, and verify that its ids equal the reference's.

The reference is `Tokenizer.encode_batch`. A fast back end must give the same ids for `probe_strings` before it is used,
and for the first documents of each chunk and every 2,000th document after that. The only fast back end is nanotoken,
for BERT's WordPiece. It uses only the calling thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, TypeVar

import numpy as np
import tokenizers

from megatron_neobert.data.tokenizer.files import STANDARD_NAMES, raise_unless_library
from megatron_neobert.data.tokenizer.tokenizer import EncodedBatch, Tokenizer
from megatron_neobert.errors import ConfigError, install_command

Backend = Literal["auto", "fast", "reference"]
Result = TypeVar("Result")
EncodeTexts = Callable[[Sequence[str]], EncodedBatch]

_REFERENCE = f"tokenizers {tokenizers.__version__}"

# The first documents of each chunk are verified, up to one of these limits. The characters take the reference 8 ms.
_FIRST_DOCUMENTS = 64
_FIRST_CHARACTERS = 1 << 15
_INTERVAL = 2000  # later, one of so many documents is verified
# Characters. The reference takes seconds and gigabytes for a longer document, so longer documents are not verified.
_LONGEST_VERIFIED = 1 << 20
# nanotoken's default is 2^20 entries, which take up to 130 MB. On 72 MB of books, 2^18 is as fast and saves 20 MB.
_NANOTOKEN_CACHE_ENTRIES = 1 << 18
# In the message about a difference.
_SHOWN_IDS = 8
_SHOWN_CHARACTERS = 200

# The probe has characters of every Unicode block, and what normalisers and pre-tokenisers disagree about: accents,
# zero-width characters, white space, very long words.
_SEED = 20_240_229
_DENSE_END = 0x3000  # every code point below is used: alphabets, marks, symbols
_BLOCK = 128  # code points; few Unicode blocks are smaller
_SAMPLE = 16  # code points of each block above _DENSE_END
_PLANES = ((_DENSE_END, 0xD800), (0xE000, 0x33480), (0xE0000, 0xE0200), (0x10FF80, 0x110000))  # without surrogates
_MIXTURES = 900  # adversarial strings of mixed characters and pieces of the vocabulary

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


class BackendMismatch(ConfigError):
    """A fast back end failed or gave other ids than the reference. All ids from this back end are invalid."""


@dataclass
class Encoder:
    """Encodes batches of documents with one back end. Created by `open_encoder`."""

    tokenizer: Tokenizer
    name: str  # back end and version, such as "nanotoken 0.1.0"
    note: str | None = None  # reason why "auto" did not choose a fast back end
    fast: EncodeTexts | None = None  # without it, the tokenizer itself encodes
    compared: int = 0  # documents since `start_chunk` whose ids were compared with the reference
    sampled_characters: int = 0  # characters of the documents that `_select` chose since `start_chunk`
    unknown_characters: int = 0  # sampled characters that unknown tokens replace
    _documents: int = 0
    _first_characters: int = 0

    @property
    def is_reference(self) -> bool:
        return self.fast is None

    def start_chunk(self) -> None:
        """Begin a chunk. The chunk's first documents are verified, because another file may contain other scripts."""
        self.compared = self.sampled_characters = self.unknown_characters = 0
        self._documents = 0
        self._first_characters = 0

    def encode_batch(self, texts: Sequence[str]) -> EncodedBatch:
        """Return the concatenated ids of all texts, without special tokens, and each text's length in tokens.

        A sample of the texts is compared with the reference, and the characters that become unknown are counted.
        Raise BackendMismatch if a fast back end fails or gives other ids.
        """
        batch = self.tokenizer.encode_batch(texts) if self.fast is None else _guarded(self.name, self.fast, texts)
        selected = self._select(texts)
        if not selected:
            return batch
        ends = np.cumsum(batch.lengths, dtype=np.int64)
        ids = [batch.ids[ends[index] - batch.lengths[index] : ends[index]] for index in selected]
        selected_texts = [texts[index] for index in selected]
        if self.fast is not None:
            _compare(self.name, selected_texts, ids, self.tokenizer.encode_batch(selected_texts).split())
            self.compared += len(selected)
        for text, ids_of_text in zip(selected_texts, ids, strict=True):
            self.sampled_characters += len(text)
            if (ids_of_text == self.tokenizer.unk_id).any():
                self.unknown_characters += self.tokenizer.count_unknown_characters(text)
        return batch

    def _select(self, texts: Sequence[str]) -> list[int]:
        """Return the ascending indices of the texts to examine, and add the batch to this chunk's document count."""
        selected = []
        start = self._documents
        self._documents += len(texts)
        for number in range(start, min(self._documents, _FIRST_DOCUMENTS)):
            if self._first_characters < _FIRST_CHARACTERS:
                selected.append(number - start)
                self._first_characters += len(texts[number - start])
        next_verified = -(-max(start, _FIRST_DOCUMENTS) // _INTERVAL) * _INTERVAL
        selected += [number - start for number in range(next_verified, self._documents, _INTERVAL)]
        return [index for index in selected if len(texts[index]) <= _LONGEST_VERIFIED]


def open_encoder(tokenizer: Tokenizer, backend: Backend, *, probe: bool = True) -> Encoder:
    """Return an encoder for the tokenizer.

    Args:
        backend: "reference", "fast", or "auto" (fast if possible, else reference, with the reason in `note`).
        probe: Compare a fast back end with the reference on `probe_strings`, which takes 0.1 s. Workers can skip this.

    Raises:
        ConfigError: `backend` is "fast", and the fast back end for this tokenizer is missing, fails or gives other ids.
    """
    if backend == "reference":
        return Encoder(tokenizer, name=_REFERENCE)
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms

    try:
        if not tokenizer.is_bert_wordpiece:
            model = type(tokenizer.backend.model).__name__
            raise BackendMismatch(f"nanotoken does not support a {model} model with this normalizer and pre-tokenizer")
        try:
            name = f"nanotoken {version('nanotoken')}"
        except PackageNotFoundError as error:
            raise BackendMismatch(
                "nanotoken is not installed, and this takes 6 to 15 times as long without it; "
                f"{install_command('fast')}"
            ) from error
        encode = _guarded(name, _build_nanotoken, tokenizer)
        if probe:
            texts = probe_strings(tokenizer)
            expected = tokenizer.encode_batch(texts).split()
            # The second time verifies the words that nanotoken caches.
            for _ in range(2):
                _compare(name, texts, _guarded(name, encode, texts).split(), expected)
        return Encoder(tokenizer, name=name, fast=encode)
    except BackendMismatch as reason:
        if backend == "fast":
            raise ConfigError(
                f"--tokenizer-backend fast: {reason}. Or use auto, which falls back to the reference"
            ) from reason
        return Encoder(tokenizer, name=_REFERENCE, note=str(reason))


def _build_nanotoken(tokenizer: Tokenizer) -> EncodeTexts:
    import nanotoken

    nanotoken.set_cache_entries(_NANOTOKEN_CACHE_ENTRIES)
    # Without special tokens, "[MASK]" is encoded as ordinary text.
    plain = tokenizers.Tokenizer(tokenizer.backend.model)
    plain.normalizer = tokenizer.backend.normalizer
    plain.pre_tokenizer = tokenizer.backend.pre_tokenizer
    fast = nanotoken.WordPieceTokenizer.from_json(plain.to_str())

    def encode(texts: Sequence[str]) -> EncodedBatch:
        ids, offsets = fast.encode_batch(texts, add_special_tokens=False, parallel=False)
        return EncodedBatch(tokenizer.without_special_ids(ids), np.diff(offsets).astype(np.int32))

    return encode


def _guarded(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call `function` and return the result. Raise BackendMismatch if the call fails or Rust panics."""
    try:
        return function(*arguments)
    except BaseException as error:
        raise_unless_library(error)
        first_line = str(error).partition("\n")[0]
        raise BackendMismatch(f"{name} failed ({type(error).__name__}: {first_line})") from error


def _compare(name: str, texts: Sequence[str], ids_of_texts: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise BackendMismatch, showing the first difference, if a text's ids differ from the expected ids."""
    for text, ids, expected_ids in zip(texts, ids_of_texts, expected, strict=True):
        if not np.array_equal(ids, expected_ids):
            pairs = zip_longest(ids.tolist(), expected_ids.tolist())
            token = next(number for number, (id_, expected_id) in enumerate(pairs) if id_ != expected_id)
            shown, expected_shown = (array[token : token + _SHOWN_IDS].tolist() for array in (ids, expected_ids))
            raise BackendMismatch(
                f"{name} differs from {_REFERENCE} at token {token:,} of the text {text[:_SHOWN_CHARACTERS]!r}: it "
                f"gives {shown}, the reference {expected_shown}"
            )


def probe_strings(tokenizer: Tokenizer) -> list[str]:
    """Return about 3,000 strings that are difficult to encode. The same tokenizer always gives the same strings."""
    generator = np.random.default_rng(_SEED)
    # Code points next to each other, between letters and after spaces.
    runs = [np.arange(start, start + 32) for start in range(0, _DENSE_END, 32)]
    for first, last in _PLANES:
        starts = np.arange(first, last, _BLOCK)
        runs += list(starts[:, None] + generator.integers(0, _BLOCK, (len(starts), _SAMPLE)))
    joiners = ("", "a", " ", " x")
    blocks = [joiners[number % 4].join(map(chr, run.tolist())) for number, run in enumerate(runs)]

    alone = ["", *_WORDS, *_SPACES, *_INVISIBLE]
    between_letters = [f"a{text}b {text} c{text}" for text in alone[1:]]
    # In WordPiece, words above a limit, by default 100 characters, are unknown. Back ends may count before or after
    # normalisation.
    limit = getattr(tokenizer.backend.model, "max_input_chars_per_word", 100)
    counts = (limit // 2, limit - 1, limit, limit + 1, 3 * limit)
    long_words = [unit * count for unit in ("a", "é", "e\u0301", "字", "ﬁ", "👍", "ab1") for count in counts]
    fixed = [*alone, *between_letters, *long_words, *(f"x {word}. y" for word in long_words)]

    declared = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()][:50]
    standard = [name for names in zip(*STANDARD_NAMES.values(), strict=True) for name in names]
    special = list(dict.fromkeys([*tokenizer.special_names.values(), *declared, *standard]))
    fixed += [*special, *(f"a{name}b {name}, {name.lower()}" for name in special)]

    pieces = map(tokenizer.backend.id_to_token, generator.integers(0, tokenizer.vocab_size, 1000).tolist())
    parts = [piece.removeprefix("##") for piece in pieces if piece is not None]
    parts += [*_WORDS, *_INVISIBLE, *special, *(" " for _ in range(99)), *_SPACES, *"aeinrst.,!?()[]\"'-/0123456789"]
    parts += [chr(code) for code in generator.integers(0x21, 0x30000, 200) if not 0xD800 <= code < 0xE000]
    choices = (generator.integers(0, len(parts), count) for count in generator.integers(1, 40, _MIXTURES))
    return [*fixed, *blocks, *("".join(parts[number] for number in numbers) for numbers in choices)]
