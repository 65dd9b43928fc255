"""Encoding of a corpus with a back end that is many times faster, for as long as its ids are the reference's.

The reference is `Tokenizer.encode_batch`. A fast back end must give the same ids on the strings of probe.py before it
is used, and is compared again while it works: the first documents of each part and every 2,000th after that. nanotoken
serves BERT's WordPiece, gigatoken byte-level and SentencePiece BPE. Both run on the calling thread alone.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import tokenizers
from tokenizers import models

from megatron_neobert.data.tokenizer.probe import EncodeTexts, describe_difference, find_mismatch
from megatron_neobert.data.tokenizer.tokenizer import EncodedBatch, Tokenizer
from megatron_neobert.errors import ConfigError

Backend = Literal["auto", "fast", "reference"]
Result = TypeVar("Result")

_FIRST_DOCUMENTS = 64  # of each part, verified one and all
_FIRST_CHARACTERS = 1 << 15  # or the first that have this many characters together: 8 ms of the reference
_INTERVAL = 2000  # documents, of which one is verified
_LONGEST = 1 << 20  # characters: a longer document would take the reference seconds and gigabytes
# nanotoken's default is 2^20, with up to 130 MB. On 72 MB of books 2^18 is as fast and saves 20 MB.
_NANOTOKEN_CACHE_ENTRIES = 1 << 18


class BackendMismatch(Exception):
    """A fast back end failed or gave other ids than the reference: what it encoded since start_part() is void."""


class Encoder:
    """Encodes batches of documents with one back end. Made by `open_encoder`.

    Attributes:
        name: The back end and its version, such as "nanotoken 0.1.0".
        note: One sentence that says why it is not a fast one although "auto" was asked for; or None.
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
        batch = _guarded(self.name, self._fast, texts)
        if len(batch.lengths) != len(texts) or int(batch.lengths.sum()) != len(batch.ids):
            raise BackendMismatch(
                f"{self.name} gave {len(batch.lengths):,} lengths with a sum of {int(batch.lengths.sum()):,} and "
                f"{len(batch.ids):,} ids for {len(texts):,} documents"
            )
        chosen = self._choose(texts)
        if chosen:
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
        difference = describe_difference(self._tokenizer, mine, found, self._tokenizer.encode_batch(mine))
        if difference is not None:
            raise BackendMismatch(f"{self.name} differs from {_reference_name()}: {difference}")
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
    opened = _open_fast(tokenizer, probe=probe)
    if isinstance(opened, Encoder):
        return opened
    if backend == "fast":
        raise ConfigError(f"--tokenizer-backend fast: {opened}. Or use auto, which then takes the reference")
    return Encoder(tokenizer, name=_reference_name(), note=f"no fast tokenizer back end: {opened}")


def _open_fast(tokenizer: Tokenizer, *, probe: bool) -> Encoder | str:
    """The fast encoder, or the reason why there is none."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that the reference does without

    model = tokenizer.backend.model
    build: Callable[[Tokenizer], EncodeTexts]
    if tokenizer.is_bert_wordpiece:
        package, build = "nanotoken", _build_nanotoken
    elif isinstance(model, models.BPE):
        package, build = "gigatoken", _build_gigatoken
    else:
        return f"there is none for a {type(model).__name__} model with this normalizer and pre-tokenizer"
    try:
        name = f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} is not installed; pip install 'megatron-neobert[fast]'"
    try:
        encode = _guarded(name, build, tokenizer)
        difference = _guarded(name, find_mismatch, tokenizer, encode) if probe else None
    except BackendMismatch as failure:
        return str(failure)
    if difference is not None:
        return f"{name} differs from {_reference_name()}: {difference}"
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
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
    return json.dumps(state)


def _guarded(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    try:
        return function(*arguments)
    except BaseException as error:
        # A Rust panic is not an Exception; Ctrl-C and a handler's SystemExit are not either, and must pass.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        first_line = str(error).partition("\n")[0]
        raise BackendMismatch(f"{name} failed ({type(error).__name__}: {first_line})") from error


def _reference_name() -> str:
    return f"tokenizers {tokenizers.__version__}"
