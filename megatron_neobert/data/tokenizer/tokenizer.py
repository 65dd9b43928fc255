"""Tokenizers behind one batch call: a WordPiece `vocab.txt`, a `tokenizer.json`, a SentencePiece model, or a folder.

Corpora are encoded without special tokens, and the text "[MASK]" stays text: it never becomes the mask id. The saved
folder, for inference, is the opposite on both counts. Nothing is downloaded and no code of a tokenizer is run.
Costs: 4 MB of text per second and core, and 130 bytes of memory per character of one call.
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

# Of a training text; a word with one of the rarer characters is unknown. SentencePiece's default is 0.9995, but its
# words survive an unknown character.
# Characters of one call of the backend, which holds about 130 bytes of memory for each.
_ENCODE_CHARACTERS = 1 << 16
_CHARACTER_COVERAGE = 0.9999
_PROBES = ["a b. 1", "\u00e9\u0301 \ufb01\u4e2d", "\U0010fffd\0\u200b", "\ue000"]  # the last: known to no vocabulary


class EncodedBatch(NamedTuple):
    """Token ids of several texts end to end (of any integer dtype), and how many belong to each text (int32)."""

    ids: NDArray[np.integer[Any]]
    lengths: NDArray[np.int32]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer whose special tokens are known. Made by `load_tokenizer` and `train_wordpiece`."""

    backend: tokenizers.Tokenizer
    special_names: dict[str, str]  # "cls", "sep", "pad", "mask", "unk" -> literal

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the five roles "cls", "sep", "pad", "mask" and "unk"."""
        ids = {}
        for role, name in self.special_names.items():
            id_ = self.backend.token_to_id(name)
            assert id_ is not None, f"{name=} is not among the {self.vocab_size} pieces"
            ids[role] = id_
        return ids

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
        """All special ids in ascending order: the five roles and what else the tokenizer declares special."""
        declared = (id_ for id_, token in self.backend.get_added_tokens_decoder().items() if token.special)
        return tuple(sorted({*self.special_tokens.values(), *declared}))

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; ids are 0 to vocab_size - 1 without gaps."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over everything that decides the ids of a text, and over the special tokens.

        Not over the post-processor and decoder, so a vocab.txt, the folder saved from it, and Hugging Face's
        tokenizer.json of the same vocabulary have one fingerprint. Null and false entries are left out (but one):
        they are the defaults of settings that later versions of the backend add.
        """
        state = parse_json(self.backend.to_str())
        if state["model"]["type"] == "Unigram":  # reading a tokenizer.json may change the last bits of a score
            pieces, scores = zip(*state["model"]["vocab"], strict=True)
            state["model"]["vocab"] = list(zip(pieces, np.array(scores, dtype=np.float32).tolist(), strict=True))
        content = {  # in the order of the keys, see _canonical
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
        """True where vocab.txt and three settings are all there is."""
        return (
            isinstance(self.backend.normalizer, normalizers.BertNormalizer)
            and isinstance(self.backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and isinstance(self.backend.model, models.WordPiece)
            and all(token.special for token in self.backend.get_added_tokens_decoder().values())
        )

    def encode_batch(self, texts: Sequence[str]) -> EncodedBatch:
        """Ids of texts without special tokens; special-token literals in a text are encoded as text.

        A model that knows such a literal as an ordinary piece (Unigram does) gets the unknown token there: no
        special id other than the unknown token's is ever returned.

        Raises:
            DataError: The library fails at what the tokenizer's file holds.
        """
        self.backend.encode_special_tokens = True  # here: a pickled or copied backend has lost the setting
        ids, lengths = [], np.zeros(len(texts), dtype=np.int32)
        for owners, pieces in self._bounded_calls(texts):
            try:
                encodings = self.backend.encode_batch_fast(pieces, add_special_tokens=False)
            except BaseException as error:
                raise_unless_library(error)
                raise DataError(
                    f"the tokenizer with {self.special_names['mask']!r} among {self.vocab_size:,} ids cannot encode a "
                    f"text ({error}); its file is damaged or incomplete: fetch it again"
                ) from error
            counts = [len(encoding) for encoding in encodings]
            np.add.at(lengths, owners, counts)
            flat = chain.from_iterable(encoding.ids for encoding in encodings)
            ids.append(np.fromiter(flat, dtype=np.int32, count=sum(counts)))
        joined = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32)
        return EncodedBatch(self.without_special_ids(joined), lengths)

    def without_special_ids(self, ids: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
        """The ids a model gave, changed in place where it knows a special token's literal as an ordinary piece."""
        if self._literals_may_be_pieces:
            ids[self._never_stored[ids]] = self.unk_id
        return ids

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Readable text of ids, special tokens shown."""
        return self.backend.decode([int(id_) for id_ in ids], skip_special_tokens=False)

    def save_tokenizer_files(self, folder: Path, *, model_max_length: int) -> None:
        """Writes what Hugging Face's `AutoTokenizer` loads without remote code: one text becomes [CLS] text [SEP].

        Args:
            folder: Created if missing; files of the same names are replaced.
            model_max_length: Longest input in tokens, [CLS] and [SEP] included.

        Raises:
            OutputError: The folder cannot be created.
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
            raise OutputError(f"{folder}: the folder cannot be created ({error.strerror}); choose another") from error
        if self.is_bert_wordpiece:  # vocab.txt alone, with these settings beside it, is then the same tokenizer
            normalizer = parse_json(self.backend.to_str())["normalizer"]
            config["do_lower_case"] = normalizer["lowercase"]
            config["strip_accents"] = normalizer["strip_accents"]
            config["tokenize_chinese_chars"] = normalizer["handle_chinese_chars"]
            vocabulary = self.backend.get_vocab(with_added_tokens=True)
            pieces = sorted(vocabulary, key=vocabulary.__getitem__)
            replace_file(folder / "vocab.txt", "".join(f"{piece}\n" for piece in pieces))
        replace_file(folder / "tokenizer.json", self._inference_backend().to_str())
        replace_file(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        replace_file(folder / "special_tokens_map.json", json.dumps(names, indent=2, ensure_ascii=False) + "\n")

    def _inference_backend(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        cls, sep = self.special_names["cls"], self.special_names["sep"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls} $A {sep}",
            pair=f"{cls} $A {sep} $B:1 {sep}:1",
            special_tokens=[(cls, self.cls_id), (sep, self.sep_id)],
        )
        return backend

    @cached_property
    def _literals_may_be_pieces(self) -> bool:
        """False for BERT's "[MASK]": the pre-tokenizer cuts at the brackets, so that no piece can match."""
        if not self.is_bert_wordpiece:
            return True
        names = (self.backend.id_to_token(id_) for id_ in self.special_ids)
        return any(len(self.backend.pre_tokenizer.pre_tokenize_str(name)) == 1 for name in names)

    @cached_property
    def _never_stored(self) -> NDArray[np.bool_]:
        table = np.zeros(self.vocab_size, dtype=np.bool_)
        table[list(self.special_ids)] = True
        table[self.unk_id] = False
        return table

    def _bounded_calls(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
        """Yield the pieces of texts for one call of the backend each, and the number of the text of each piece."""
        owners: list[int] = []
        pieces: list[str] = []
        characters = 0
        for owner, text in enumerate(texts):
            for piece in _split_at_spaces(text) if self.is_bert_wordpiece else (text,):
                if characters and characters + len(piece) > _ENCODE_CHARACTERS:
                    yield owners, pieces
                    owners, pieces, characters = [], [], 0
                owners.append(owner)
                pieces.append(piece)
                characters += len(piece)
        if pieces:
            yield owners, pieces


def load_tokenizer(path: str | Path, tokenizer_type: str = "auto") -> Tokenizer:
    """Reads `vocab.txt`, `tokenizer.json`, a SentencePiece model, or a folder with one of them.

    A tokenizer_config.json beside the file names special tokens of other spelling and, for vocab.txt, decides about
    lower case; without it a vocabulary is uncased when no ordinary piece has an upper-case letter.

    Args:
        path: Of a local file or folder.
        tokenizer_type: One of config.TOKENIZER_TYPES; "auto" goes by the file.

    Raises:
        ConfigError: The type does not fit the file.
        MissingInputError: There is no such file or folder, or the folder holds no tokenizer.
        DataError: A file is damaged, ids have gaps or duplicates, or a special token is missing.
    """
    file = find_tokenizer_file(Path(path), tokenizer_type)
    if is_sentencepiece(file):
        backend, names = read_sentencepiece(file)
    else:
        backend, names = read_tokenizer_files(file, tokenizer_type)
    tokenizer = _with_special_tokens(backend, names)
    _check_use(tokenizer, file)
    return tokenizer


def _check_use(tokenizer: Tokenizer, file: Path) -> None:
    """Refuses what would fail, or train on other tokens than [MASK], hours later."""
    shared = [role for role, id_ in tokenizer.special_tokens.items() if role != "mask" and id_ == tokenizer.mask_id]
    if shared:
        raise DataError(
            f"{file}: '{tokenizer.special_names['mask']}' is the mask token and the {shared[0]} token as well; what is "
            "predicted needs a token of its own. Correct tokenizer_config.json"
        )
    unknown = tokenizer.special_names["unk"]
    if tokenizer.is_bert_wordpiece and tokenizer.backend.model.unk_token != unknown:
        raise DataError(
            f"{file}: the model writes '{tokenizer.backend.model.unk_token}' for unknown text, but '{unknown}' is the "
            "unknown token; correct unk_token in tokenizer_config.json"
        )
    try:
        tokenizer.encode_batch(_PROBES)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


def train_wordpiece(texts: Iterable[str], *, vocab_size: int, lowercase: bool, min_frequency: int) -> Tokenizer:
    """A WordPiece tokenizer in BERT's layout, learned from texts; the same texts always give the same vocabulary.

    Args:
        texts: Read twice, for the characters and for the words. Memory grows with the number of distinct words.
        vocab_size: Upper bound of the number of ids; small texts give fewer.
        lowercase: Lower-case and strip accents before anything else, in training and in use.
        min_frequency: A pair of pieces seen less often is not merged.

    Raises:
        ConfigError: The characters alone need more ids than vocab_size.
    """
    assert not isinstance(texts, Iterator), "texts are read twice: an iterator would be empty the second time"
    names = {role: standard for role, (standard, _) in STANDARD_NAMES.items()}
    backend = build_bert_backend(models.WordPiece(unk_token=names["unk"]), lowercase=lowercase)
    alphabet = _frequent_characters(texts, backend)
    # The trainer numbers the "##" characters in the order of a hash table, and breaks ties between equally frequent
    # pairs by those numbers: handing it all of them as if they were special tokens fixes the order.
    fixed = [names[role] for role in ("pad", "unk", "cls", "sep", "mask")]
    # Not punctuation, nor scripts that BERT splits into single characters: they never continue a word.
    cut, normalize = backend.pre_tokenizer.pre_tokenize_str, backend.normalizer.normalize_str
    fixed += [f"##{character}" for character in alphabet if len(cut(normalize(f"a{character}"))) == 1]
    if len(fixed) + len(alphabet) > vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size:,} is below the {len(fixed) + len(alphabet):,} ids that the special tokens and "
            f"the {len(alphabet):,} frequent characters of the texts need; use more, or fewer kinds of text"
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
    model = models.WordPiece(backend.get_vocab(), unk_token=names["unk"])
    return _with_special_tokens(build_bert_backend(model, lowercase=lowercase), names)


def _frequent_characters(texts: Iterable[str], backend: tokenizers.Tokenizer) -> list[str]:
    """Return the characters that cover _CHARACTER_COVERAGE of the normalised texts, and all of ASCII, sorted."""
    normalize = backend.normalizer.normalize_str
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalize(text))
    ranked = sorted((item for item in counts.items() if not item[0].isspace()), key=lambda item: (-item[1], item[0]))
    needed = _CHARACTER_COVERAGE * sum(count for _, count in ranked)
    covered_before = accumulate((count for _, count in ranked), initial=0)
    frequent = {character for (character, _), before in zip(ranked, covered_before, strict=False) if before < needed}
    ascii_characters = {chr(code) for code in range(33, 127) if normalize(chr(code)) == chr(code)}
    return sorted(frequent | ascii_characters)


def _with_special_tokens(backend: tokenizers.Tokenizer, names: dict[str, str]) -> Tokenizer:
    declared = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    # Not those already declared special: declaring again would drop their lstrip and rstrip, which inference needs.
    backend.add_special_tokens([name for name in names.values() if name not in declared])
    return Tokenizer(backend, names)


def _split_at_spaces(text: str) -> Iterator[str]:
    """Yield pieces of at most _ENCODE_CHARACTERS, cut before a space or line feed; a longer word stays whole."""
    start = 0
    while len(text) - start > _ENCODE_CHARACTERS:
        end = start + _ENCODE_CHARACTERS
        cut = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
        if cut < 0:
            later = [found for found in (text.find(" ", end), text.find("\n", end)) if found >= 0]
            cut = min(later, default=len(text))
        yield text[start:cut]
        start = cut
    if start < len(text) or not text:
        yield text[start:]


def _canonical(value: Any) -> Any:
    """Sorted by key and without defaults. Here because json's own sorting takes three times as long for 30,000 keys."""
    if isinstance(value, dict):
        if value.get("type") == "BertNormalizer" and value["lowercase"] and value["strip_accents"] is False:
            value = {**value, "strip_accents": "never"}  # of all settings the one to which null does not mean false
        kept = (key for key in sorted(value) if value[key] is not None and value[key] is not False)
        return {key: value[key] if isinstance(value[key], int) else _canonical(value[key]) for key in kept}
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):  # not the pairs of merges, scores
        return [_canonical(inner) for inner in value]
    return value
