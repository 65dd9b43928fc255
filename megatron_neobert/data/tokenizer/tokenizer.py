"""The tokenizer interface: load a `vocab.txt`, a `tokenizer.json` or a SentencePiece model, encode, save, train.

`encode_batch` is for corpora: it adds no special tokens, and the text "[MASK]" never becomes the mask id. The folder
that `save_tokenizer_files` writes is for inference and does both. No code of a tokenizer is executed. Costs: 4 MB of
text per second and core, and 130 bytes of memory per character of one call.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from megatron_neobert.data.tokenizer.files import (
    STANDARD_NAMES,
    build_bert_backend,
    find_tokenizer_file,
    is_sentencepiece,
    raise_unless_library,
    read_tokenizer_files,
)
from megatron_neobert.data.tokenizer.sentencepiece_files import read_sentencepiece
from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.runtime.atomic_files import replace_file
from megatron_neobert.text import parse_json

# Characters in one call of the backend, which needs about 130 bytes of memory for each.
_ENCODE_CHARACTERS = 1 << 16
# Share of a training text that the characters of the vocabulary cover. In WordPiece, a word with any other character is
# unknown as a whole, so the share is higher than SentencePiece's default of 0.9995.
_CHARACTER_COVERAGE = 0.9999
# Words above this limit of characters are unknown as a whole. BERT's limit, 100, loses text in scripts without spaces:
# the longest of 2,200 words of Lao has 178 characters. The time for a word grows with the square of its length.
_LONGEST_WORD = 500
_LONGEST_WORD_OF_BERT = 100
# Texts that every usable tokenizer can encode; the last one is in no vocabulary.
_PROBES = ["a b. 1", "\u00e9\u0301 \ufb01\u4e2d", "\U0010fffd\0\u200b", "\ue000"]


class EncodedBatch(NamedTuple):
    """Concatenated token ids of several texts (any integer dtype), and the number of tokens of each text (int32)."""

    ids: NDArray[np.integer[Any]]
    lengths: NDArray[np.int32]

    def split(self) -> list[NDArray[np.integer[Any]]]:
        """Return the ids of each text. The batch must not be empty."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1])


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with all five special tokens. Created by `load_tokenizer` and `train_wordpiece`."""

    backend: tokenizers.Tokenizer
    special_names: dict[str, str]  # "cls", "sep", "pad", "mask", "unk" -> text of the token

    def __post_init__(self) -> None:
        declared = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        # Declaring a special token again would reset its lstrip and rstrip, which inference needs.
        self.backend.add_special_tokens([name for name in self.special_names.values() if name not in declared])

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, by role."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return {role: vocabulary[name] for role, name in self.special_names.items()}

    @property
    def cls_id(self) -> int:
        return self.special_tokens["cls"]

    @property
    def sep_id(self) -> int:
        return self.special_tokens["sep"]

    @property
    def pad_id(self) -> int:
        return self.special_tokens["pad"]

    @property
    def mask_id(self) -> int:
        return self.special_tokens["mask"]

    @property
    def unk_id(self) -> int:
        return self.special_tokens["unk"]

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of the five roles and of all other tokens that the tokenizer declares special, in ascending order."""
        declared = (id_ for id_, token in self.backend.get_added_tokens_decoder().items() if token.special)
        return tuple(sorted({*self.special_tokens.values(), *declared}))

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens. The ids are 0 to vocab_size - 1 without gaps."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 over everything that decides the ids of a text, and over the special tokens.

        The post-processor and the decoder are not included. So a vocab.txt, the folder saved from it, and Hugging
        Face's tokenizer.json of the same vocabulary have the same fingerprint.
        """
        state = parse_json(self.backend.to_str())
        # Reading a tokenizer.json may change the last bits of a score.
        if state["model"]["type"] == "Unigram":
            pieces, scores = zip(*state["model"]["vocab"], strict=True)
            state["model"]["vocab"] = list(zip(pieces, np.array(scores, dtype=np.float32).tolist(), strict=True))
        # Sorted by key, like the result of _canonical.
        content = {
            "added_tokens": [token for token in state["added_tokens"] if not token["special"]],
            "model": state["model"],
            "normalizer": state["normalizer"],
            "pre_tokenizer": state["pre_tokenizer"],
            "special_ids": self.special_ids,
            "special_tokens": self.special_tokens,
        }
        text = json.dumps({key: _canonical(value) for key, value in content.items()})
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def is_bert_wordpiece(self) -> bool:
        """True if this is BERT's WordPiece, which a vocab.txt and three normalizer settings define completely."""
        return (
            isinstance(self.backend.normalizer, normalizers.BertNormalizer)
            and isinstance(self.backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and isinstance(self.backend.model, models.WordPiece)
            and all(token.special for token in self.backend.get_added_tokens_decoder().values())
        )

    def encode_batch(self, texts: Sequence[str]) -> EncodedBatch:
        """Return the concatenated ids of all texts (int32) and the length of each text. No special tokens are added.

        The text of a special token, such as "[MASK]", is encoded as ordinary text. If that yields a special id, as a
        Unigram model can, the unknown id replaces it. The result has no special id other than the unknown id.
        Raise DataError if the library cannot encode a text, because the tokenizer's file is damaged.
        """
        self.backend.encode_special_tokens = True  # set here, because pickling and copying lose it
        ids, lengths = [], np.zeros(len(texts), dtype=np.int32)
        for text_numbers, parts in self._split_into_calls(texts):
            try:
                encodings = self.backend.encode_batch_fast(parts, add_special_tokens=False)
            except BaseException as error:
                raise_unless_library(error)
                raise DataError(
                    f"the tokenizer with {self.special_names['mask']!r} among {self.vocab_size:,} ids cannot encode a "
                    f"text ({error}); its file is damaged or incomplete: fetch it again"
                ) from error
            counts = [len(encoding) for encoding in encodings]
            np.add.at(lengths, text_numbers, counts)
            flat = chain.from_iterable(encoding.ids for encoding in encodings)
            ids.append(np.fromiter(flat, dtype=np.int32, count=sum(counts)))
        joined = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32)
        return EncodedBatch(self.without_special_ids(joined), lengths)

    def count_unknown_characters(self, text: str) -> int:
        """Return the number of characters of a text that unknown tokens replace."""
        self.backend.encode_special_tokens = True
        encoding = self.backend.encode(text, add_special_tokens=False)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        return sum(end - start for id_, (start, end) in tokens if id_ == self.unk_id)

    def without_special_ids(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
        """Replace special ids by the unknown id, in place, and return the array."""
        # On cached words, the lookup takes 17 % of the time of nanotoken.
        if self._replaced_ids is not None:
            ids[self._replaced_ids[ids]] = self.unk_id
        return ids

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Decode ids to text, including the text of special tokens."""
        return self.backend.decode([int(id_) for id_ in ids], skip_special_tokens=False)

    def save_tokenizer_files(self, folder: Path, *, model_max_length: int) -> None:
        """Write the files that Hugging Face's `AutoTokenizer` loads. They encode a text as [CLS] text [SEP].

        The folder is created if it does not exist, and existing files are replaced. `model_max_length` is the longest
        input in tokens, including [CLS] and [SEP]. Raise OutputError if the folder cannot be created.
        """
        names = {f"{role}_token": name for role, name in self.special_names.items()}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model_max_length,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            **names,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder} cannot be created ({error.strerror}); choose another folder") from error
        # With these settings, vocab.txt alone defines the same tokenizer. It has no limit of the length of words.
        if self.is_bert_wordpiece and self.backend.model.max_input_chars_per_word == _LONGEST_WORD_OF_BERT:
            normalizer = parse_json(self.backend.to_str())["normalizer"]
            config["do_lower_case"] = normalizer["lowercase"]
            config["strip_accents"] = normalizer["strip_accents"]
            config["tokenize_chinese_chars"] = normalizer["handle_chinese_chars"]
            vocabulary = self.backend.get_vocab(with_added_tokens=True)
            pieces = sorted(vocabulary, key=vocabulary.__getitem__)
            replace_file(folder / "vocab.txt", "".join(f"{piece}\n" for piece in pieces))
        inference = tokenizers.Tokenizer.from_str(self.backend.to_str())
        cls, sep = self.special_names["cls"], self.special_names["sep"]
        inference.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, self.cls_id), (sep, self.sep_id)],
        )
        replace_file(folder / "tokenizer.json", inference.to_str())
        replace_file(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        replace_file(folder / "special_tokens_map.json", json.dumps(names, indent=2, ensure_ascii=False) + "\n")

    @cached_property
    def _replaced_ids(self) -> NDArray[np.bool_] | None:
        """True for each special id except the unknown id; None if no text is encoded to such an id.

        A special token's text is encoded to the token's id if the text is a piece of the model. BERT's "[MASK]" never
        is, because the pre-tokenizer splits the text at the brackets.
        """
        if self.is_bert_wordpiece:
            names = (self.backend.id_to_token(id_) for id_ in self.special_ids)
            if not any(len(self.backend.pre_tokenizer.pre_tokenize_str(name)) == 1 for name in names):
                return None
        table = np.zeros(self.vocab_size, dtype=np.bool_)
        table[list(self.special_ids)] = True
        table[self.unk_id] = False
        return table

    def _split_into_calls(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """Yield two lists per backend call: the index in `texts` of each part, and the parts to encode."""
        text_numbers: list[int] = []
        parts: list[str] = []
        characters = 0
        for number, text in enumerate(texts):
            # Only BERT's WordPiece gives the same ids for a text and for its parts.
            for part in _split_at_spaces(text) if self.is_bert_wordpiece else (text,):
                if characters and characters + len(part) > _ENCODE_CHARACTERS:
                    yield text_numbers, parts
                    text_numbers, parts, characters = [], [], 0
                text_numbers.append(number)
                parts.append(part)
                characters += len(part)
        if parts:
            yield text_numbers, parts


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a `vocab.txt`, a `tokenizer.json`, a SentencePiece model, or a folder with one of these files.

    A tokenizer_config.json in the same folder may rename special tokens and, for a vocab.txt, determines lower-casing.
    A vocab.txt without this setting is uncased if no ordinary piece has an upper-case letter. Raise MissingInputError
    if no tokenizer file is found, and DataError if a file is damaged or cannot be used.

    Args:
        path: File or folder, or [OWNER/]NAME[@REVISION] of the Hugging Face Hub.
    """
    file = find_tokenizer_file(Path(path))
    tokenizer = Tokenizer(*(read_sentencepiece(file) if is_sentencepiece(file) else read_tokenizer_files(file)))
    shared = [role for role, id_ in tokenizer.special_tokens.items() if role != "mask" and id_ == tokenizer.mask_id]
    if shared:
        raise DataError(
            f"{file}: '{tokenizer.special_names['mask']}' is the mask token and also the {shared[0]} token; the mask "
            "needs a separate token. Correct tokenizer_config.json"
        )
    unknown = tokenizer.special_names["unk"]
    if tokenizer.is_bert_wordpiece and tokenizer.backend.model.unk_token != unknown:
        raise DataError(
            f"{file}: the model uses '{tokenizer.backend.model.unk_token}' for unknown text, but the unknown token is "
            f"'{unknown}'; correct unk_token in tokenizer_config.json"
        )
    try:
        tokenizer.encode_batch(_PROBES)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    return tokenizer


def train_wordpiece(texts: Iterable[str], *, vocab_size: int, lowercase: bool, min_frequency: int) -> Tokenizer:
    """Train a WordPiece tokenizer in BERT's layout. The same texts always give the same vocabulary.

    Args:
        texts: Not an iterator, because the texts are read twice, for characters and words. Memory grows with the
            number of distinct words.
        vocab_size: Largest number of ids. Small texts give fewer.
        lowercase: Lower-case and strip accents, in training and in use.
        min_frequency: How often two pieces must occur together before they are merged.

    Raises:
        ConfigError: The special tokens and characters need more ids than `vocab_size`.
    """
    assert not isinstance(texts, Iterator), "texts are read twice, but an iterator is empty the second time"
    names = {role: standard for role, (standard, _) in STANDARD_NAMES.items()}
    backend = build_bert_backend(models.WordPiece(unk_token=names["unk"]), lowercase=lowercase)
    pre_tokenize, normalize = backend.pre_tokenizer.pre_tokenize_str, backend.normalizer.normalize_str
    # The alphabet: the most frequent characters up to _CHARACTER_COVERAGE of the normalised texts, and the printable
    # ASCII characters that the normalizer does not change.
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalize(text))
    ranked = sorted((item for item in counts.items() if not item[0].isspace()), key=lambda item: (-item[1], item[0]))
    needed = _CHARACTER_COVERAGE * sum(count for _, count in ranked)
    # Number of occurrences of all more frequent characters.
    preceding = accumulate((count for _, count in ranked), initial=0)
    frequent = {character for (character, _), covered in zip(ranked, preceding, strict=False) if covered < needed}
    ascii_characters = {chr(code) for code in range(33, 127) if normalize(chr(code)) == chr(code)}
    alphabet = sorted(frequent | ascii_characters)
    # The trainer numbers the "##" characters in the order of a hash table, and breaks ties between equally frequent
    # pairs by these numbers. Passing all of them as special tokens fixes the order.
    fixed = [names[role] for role in ("pad", "unk", "cls", "sep", "mask")]
    # Punctuation and the scripts that BERT splits into single characters never continue a word.
    fixed += [f"##{character}" for character in alphabet if len(pre_tokenize(normalize(f"a{character}"))) == 1]
    if (ids_needed := len(fixed) + len(alphabet)) > vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size:,} is below the {ids_needed:,} ids that the special tokens and the "
            f"{len(alphabet):,} frequent characters of the texts need; raise it, or use texts with fewer characters"
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=fixed,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    model = models.WordPiece(backend.get_vocab(), unk_token=names["unk"], max_input_chars_per_word=_LONGEST_WORD)
    return Tokenizer(build_bert_backend(model, lowercase=lowercase), names)


def _split_at_spaces(text: str) -> Iterator[str]:
    """Yield parts, cut before spaces or line feeds. A part exceeds _ENCODE_CHARACTERS only if a word does."""
    start = 0
    while len(text) - start > _ENCODE_CHARACTERS:
        end = start + _ENCODE_CHARACTERS
        cut = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
        if cut < 0:
            cut = min((at for at in (text.find(" ", end), text.find("\n", end)) if at >= 0), default=len(text))
        yield text[start:cut]
        start = cut
    if start < len(text) or not text:
        yield text[start:]


def _canonical(value: Any) -> Any:
    """Return a JSON value with sorted keys and without null and false entries, also inside nested values.

    Null and false are the defaults of settings that later versions of the backend add.
    """
    # json.dumps(sort_keys=True) takes three times as long for 30,000 keys.
    if isinstance(value, dict):
        # For strip_accents alone, false does not mean the same as null.
        if value.get("type") == "BertNormalizer" and value["lowercase"] and value["strip_accents"] is False:
            value = {**value, "strip_accents": "never"}
        keys = (key for key in sorted(value) if value[key] is not None and value[key] is not False)
        return {key: value[key] if isinstance(value[key], int) else _canonical(value[key]) for key in keys}
    # Long lists of merges and scores have no dictionaries.
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return [_canonical(entry) for entry in value]
    return value
