"""Encoding of a corpus with a back end that is many times faster, for as long as its ids are the reference's.

The reference is `Tokenizer.encode_batch`. A fast back end must give the same ids on `probe_strings` before it is used,
and is compared again while it works: the first documents of each part and every 2,000th after that. nanotoken serves
BERT's WordPiece, gigatoken byte-level and SentencePiece BPE. Both run on the calling thread alone.
"""

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Literal, TypeVar

import numpy as np
import tokenizers
from tokenizers import models

from megatron_neobert.data.tokenizer.files import raise_unless_library
from megatron_neobert.data.tokenizer.tokenizer import EncodedBatch, Tokenizer
from megatron_neobert.errors import ConfigError
from megatron_neobert.text import parse_json

Backend = Literal["auto", "fast", "reference"]
Result = TypeVar("Result")
EncodeTexts = Callable[[Sequence[str]], EncodedBatch]

_FIRST_DOCUMENTS = 64  # of each part, all verified
_FIRST_CHARACTERS = 1 << 15  # or the first that have this many characters together: 8 ms of the reference
_INTERVAL = 2000  # documents, of which one is verified
_LONGEST = 1 << 20  # characters: a longer document would take the reference seconds and gigabytes
# nanotoken's default is 2^20, with up to 130 MB. On 72 MB of books 2^18 is as fast and saves 20 MB.
_NANOTOKEN_CACHE_ENTRIES = 1 << 18
_SHOWN_IDS = 8  # of a difference

# Of the probe: characters of every Unicode block, and what normalisers and pre-tokenisers disagree about (accents,
# zero-width characters, white space, overlong words).
_SEED = 20_240_229
_DENSE_END = 0x3000  # below: alphabets, marks, symbols; every code point is tried
_BLOCK = 128  # code points; blocks of Unicode start at multiples of 16, few are smaller than this
_SAMPLE = 16  # code points of each block above _DENSE_END
_PLANES = ((_DENSE_END, 0xD800), (0xE000, 0x33480), (0xE0000, 0xE0200), (0x10FF80, 0x110000))  # no surrogates
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
    """A fast back end failed or gave other ids than the reference: what it encoded is void."""


class Encoder:
    """Encodes batches of documents with one back end. Made by `open_encoder`.

    Attributes:
        name: The back end and its version, such as "nanotoken 0.1.0".
        note: One sentence about why it is not a fast one although "auto" was asked for; or None.
        is_reference: Whether ids come from the tokenizer itself.
        compared: Documents since start_part() whose ids were compared with the reference's.
    """

    def __init__(self, tokenizer: Tokenizer, *, name: str, note: str | None = None, fast: EncodeTexts | None = None):
        self.name = name
        self.note = note
        self.is_reference = fast is None
        self._tokenizer = tokenizer
        self._fast = fast
        self.start_part()

    def start_part(self) -> None:
        """Verifies the next documents all over again: other shards hold other scripts."""
        self.compared = 0
        self._documents = 0
        self._first_characters = 0

    def encode_batch(self, texts: Sequence[str]) -> EncodedBatch:
        """Ids of texts, as `Tokenizer.encode_batch` gives them; their dtype is any integer type.

        Raises:
            BackendMismatch: The fast back end failed, or a verified document has other ids than the reference gives.
        """
        if self._fast is None:
            return self._tokenizer.encode_batch(texts)
        batch = _encode(self.name, self._fast, texts)
        if chosen := self._choose(texts):
            self._verify(texts, batch, chosen)
        return batch

    def _choose(self, texts: Sequence[str]) -> list[int]:
        """Positions of the documents of a batch that are to be verified; counts the documents."""
        chosen = []
        start = self._documents
        self._documents += len(texts)
        for number in range(start, min(self._documents, _FIRST_DOCUMENTS)):
            if self._first_characters < _FIRST_CHARACTERS:
                chosen.append(number - start)
                self._first_characters += len(texts[number - start])
        due = -(-max(start, _FIRST_DOCUMENTS) // _INTERVAL) * _INTERVAL
        chosen += [number - start for number in range(due, self._documents, _INTERVAL)]
        return [position for position in chosen if len(texts[position]) <= _LONGEST]

    def _verify(self, texts: Sequence[str], batch: EncodedBatch, chosen: Sequence[int]) -> None:
        ends = np.cumsum(batch.lengths, dtype=np.int64)
        rows = [batch.ids[ends[position] - batch.lengths[position] : ends[position]] for position in chosen]
        found = EncodedBatch(np.concatenate(rows), batch.lengths[list(chosen)])
        mine = [texts[position] for position in chosen]
        _compare(self.name, self._tokenizer, mine, found, self._tokenizer.encode_batch(mine))
        self.compared += len(chosen)


def open_encoder(tokenizer: Tokenizer, backend: Backend, *, probe: bool = True) -> Encoder:
    """The fastest usable back end of a tokenizer.

    Args:
        backend: "reference", "fast" (or nothing), or "auto": fast where it is possible, else the reference with a note.
        probe: Compare the back end with the reference first, which takes 0.1 seconds. Workers need not repeat it.

    Raises:
        ConfigError: "fast" was asked for and no fast back end can be used.
    """
    if backend == "reference":
        return Encoder(tokenizer, name=_reference_name())
    try:
        return _open_fast(tokenizer, probe=probe)
    except BackendMismatch as reason:
        if backend == "fast":
            raise ConfigError(
                f"--tokenizer-backend fast: {reason}. Or use auto, which then takes the reference"
            ) from reason
        return Encoder(tokenizer, name=_reference_name(), note=f"no fast tokenizer back end: {reason}")


def _open_fast(tokenizer: Tokenizer, *, probe: bool) -> Encoder:
    """Return the fast encoder. Raise BackendMismatch if there is none that is right."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that the reference does without

    model = tokenizer.backend.model
    build: Callable[[Tokenizer], EncodeTexts]
    if tokenizer.is_bert_wordpiece:
        package, build = "nanotoken", _build_nanotoken
    elif isinstance(model, models.BPE):
        package, build = "gigatoken", _build_gigatoken
    else:
        raise BackendMismatch(
            f"there is none for a {type(model).__name__} model with this normalizer and pre-tokenizer"
        )
    try:
        name = f"{package} {version(package)}"
    except PackageNotFoundError as error:
        raise BackendMismatch(f"{package} is not installed; pip install 'megatron-neobert[fast]'") from error
    encode = _guarded(name, build, tokenizer)
    if probe:
        check_on_probe(name, tokenizer, encode)
    return Encoder(tokenizer, name=name, fast=encode)


def _build_nanotoken(tokenizer: Tokenizer) -> EncodeTexts:
    import nanotoken

    nanotoken.set_cache_entries(_NANOTOKEN_CACHE_ENTRIES)
    fast = nanotoken.WordPieceTokenizer.from_json(_json_without_special_tokens(tokenizer))

    def encode(texts: Sequence[str]) -> EncodedBatch:
        ids, offsets = fast.encode_batch(texts, add_special_tokens=False, parallel=False)
        return EncodedBatch(tokenizer.without_special_ids(ids), np.diff(offsets).astype(np.int32))

    return encode


def _build_gigatoken(tokenizer: Tokenizer) -> EncodeTexts:
    from gigatoken.gigatoken_rs import load_hf_json

    fast = load_hf_json(_json_without_special_tokens(tokenizer))

    def encode(texts: Sequence[str]) -> EncodedBatch:
        rows = fast.encode_batch(texts, parallel=False).layout  # awkward's ListOffsetArray: its buffers are used as is
        offsets = rows.offsets.data
        ids = tokenizer.without_special_ids(rows.content.data[offsets[0] : offsets[-1]])
        return EncodedBatch(ids, np.diff(offsets).astype(np.int32))

    return encode


def _json_without_special_tokens(tokenizer: Tokenizer) -> str:
    """A tokenizer.json in which the literals of special tokens are nothing but text, as in `Tokenizer.encode_batch`."""
    backend = tokenizer.backend
    if all(token.special for token in backend.get_added_tokens_decoder().values()):  # ten times faster than below
        plain = tokenizers.Tokenizer(backend.model)
        plain.normalizer = backend.normalizer
        plain.pre_tokenizer = backend.pre_tokenizer
        return plain.to_str()
    state = parse_json(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    return json.dumps(state)


def _guarded(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    try:
        return function(*arguments)
    except BaseException as error:
        raise_unless_library(error)
        first_line = str(error).partition("\n")[0]
        raise BackendMismatch(f"{name} failed ({type(error).__name__}: {first_line})") from error


def _reference_name() -> str:
    return f"tokenizers {tokenizers.__version__}"


def _encode(name: str, fast: EncodeTexts, texts: Sequence[str]) -> EncodedBatch:
    batch = _guarded(name, fast, texts)
    if len(batch.lengths) != len(texts) or int(batch.lengths.sum()) != len(batch.ids):
        raise BackendMismatch(
            f"{name} gave {len(batch.lengths):,} lengths with a sum of {int(batch.lengths.sum()):,} and "
            f"{len(batch.ids):,} ids for {len(texts):,} documents"
        )
    return batch


def check_on_probe(name: str, tokenizer: Tokenizer, encode: EncodeTexts) -> None:
    """Raise BackendMismatch if a back end differs from the reference on the probe's strings.

    Everything is encoded twice: fast back ends remember words, and what they remember must be right as well.
    """
    texts = probe_strings(tokenizer)
    expected = tokenizer.encode_batch(texts)
    for _ in range(2):
        _compare(name, tokenizer, texts, _encode(name, encode, texts), expected)


def _compare(
    name: str, tokenizer: Tokenizer, texts: Sequence[str], found: EncodedBatch, expected: EncodedBatch
) -> None:
    """Raise BackendMismatch with the first text that was encoded otherwise, the place, and both ids."""
    if np.array_equal(found.lengths, expected.lengths) and np.array_equal(found.ids, expected.ids):
        return
    rows = (np.split(batch.ids, np.cumsum(batch.lengths)[:-1]) for batch in (found, expected))
    text, ids, wanted = next(row for row in zip(texts, *rows, strict=True) if not np.array_equal(*row[1:]))
    pairs = zip_longest(ids.tolist(), wanted.tolist())
    first = next(place for place, (one, other) in enumerate(pairs) if one != other)
    offsets = tokenizer.backend.encode(text, add_special_tokens=False).offsets
    place = offsets[first][0] if first < len(offsets) else len(text)
    shown, right = (some[first : first + _SHOWN_IDS].tolist() for some in (ids, wanted))
    raise BackendMismatch(
        f"{name} differs from {_reference_name()}: at token {first:,}, near {text[max(0, place - 30) : place + 30]!r}, "
        f"it gives {shown} and the reference {right}"
    )


def probe_strings(tokenizer: Tokenizer) -> list[str]:
    """About 3,000 valid Unicode strings for this tokenizer, always the same, which take the reference 0.1 seconds."""
    generator = np.random.default_rng(_SEED)
    # Code points one after the other, between letters, and after spaces, so that each meets each kind of neighbour.
    runs = [np.arange(start, start + 32) for start in range(0, _DENSE_END, 32)]
    for first, last in _PLANES:
        starts = np.arange(first, last, _BLOCK)
        runs += list(starts[:, None] + generator.integers(0, _BLOCK, (len(starts), _SAMPLE)))
    joiners = ("", "a", " ", " x")
    blocks = [joiners[number % 4].join(map(chr, run.tolist())) for number, run in enumerate(runs)]

    alone = ["", *_WORDS, *_SPACES, *_INVISIBLE]
    around = [f"a{text}b {text} c{text}" for text in alone[1:]]
    # WordPiece gives up on a word of more than 100 characters, counted after some normalisation and before other.
    long_words = [
        unit * count for unit in ("a", "é", "e\u0301", "字", "ﬁ", "👍", "ab1") for count in (50, 99, 100, 101, 300)
    ]
    fixed = [*alone, *around, *long_words, *(f"x {word}. y" for word in long_words)]

    declared = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()][:50]
    standard = ["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]", "<s>", "</s>", "<pad>", "<mask>", "<unk>"]
    literals = list(dict.fromkeys([*tokenizer.special_names.values(), *declared, *standard]))
    fixed += [*literals, *(f"a{literal}b {literal}, {literal.lower()}" for literal in literals)]

    known = (tokenizer.backend.id_to_token(id_) for id_ in generator.integers(0, tokenizer.vocab_size, 1000).tolist())
    parts = [piece.removeprefix("##").replace("▁", " ").replace("Ġ", " ") for piece in known if piece is not None]
    parts += [*_WORDS, *_INVISIBLE, *literals, *(" " for _ in range(99)), *_SPACES, *"aeinrst.,!?()[]\"'-/0123456789"]
    parts += [chr(code) for code in generator.integers(0x21, 0x30000, 200) if not 0xD800 <= code < 0xE000]
    drawn = (generator.integers(0, len(parts), count) for count in generator.integers(1, 40, _MIXTURES))
    return [*fixed, *blocks, *("".join(parts[number] for number in numbers) for numbers in drawn)]
