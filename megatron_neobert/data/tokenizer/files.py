"""Read and check tokenizer files.

Every error message names the file and, if possible, the line. No code of a tokenizer is executed.
"""

import base64
import json
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron_neobert.errors import DataError, MissingInputError, suggest_path
from megatron_neobert.huggingface.hub import ALL_TOKENIZER_FILES, find_in_hub
from megatron_neobert.text import parse_json, visible

# Names of the special tokens unless a tokenizer_config.json renames them: BERT's, then RoBERTa's.
STANDARD_NAMES = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}

_LARGEST_FILE_BYTES = 512 << 20  # a vocabulary of a million pieces takes 100 MB

# File names that are looked for in a folder, in this order.
_FILE_NAMES = ("tokenizer.json", "vocab.txt", "tokenizer.model", "spiece.model")


def find_tokenizer_file(path: Path) -> Path:
    """Return `path` if it is a file. For a folder, return the first of _FILE_NAMES that exists there.

    A path that does not exist may be [OWNER/]NAME[@REVISION] of the Hugging Face Hub, see `find_in_hub`. Raise
    MissingInputError if the path does not exist, or the folder has none of these files.
    """
    is_corpus = path.with_name(f"{path.name}.idx").is_file()
    folder = path if is_corpus else find_in_hub("--tokenizer-model", path, ALL_TOKENIZER_FILES) or path
    if folder.is_dir():
        file = next((folder / name for name in _FILE_NAMES if (folder / name).is_file()), None)
        if file is None:
            raise MissingInputError(
                f"--tokenizer-model {path} has no {' or '.join(_FILE_NAMES)}; name a folder that has one, or a file"
            )
        return file
    if not path.is_file():
        missing = f"no such file or folder{suggest_path(path, otherwise=';')}"
        found = "a corpus, which --data-path reads;" if is_corpus else missing
        raise MissingInputError(
            f"--tokenizer-model {path}: {found} name a vocab.txt, tokenizer.json or SentencePiece model, a folder "
            "with one of them, or a model of the Hugging Face Hub"
        )
    return path


def is_sentencepiece(path: Path) -> bool:
    """Return True if the name ends in .model or the file begins like a SentencePiece protobuf message."""
    with path.open("rb") as file:
        head = file.read(3)
    return path.suffix == ".model" or head[:1] == head[2:] == b"\n"


def read_whole(path: Path) -> bytes:
    """Return the content of a tokenizer file. Raise DataError if the file is larger than 512 MiB."""
    if (size := path.stat().st_size) > _LARGEST_FILE_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes; a tokenizer file has at most {_LARGEST_FILE_BYTES:,}. Name a tokenizer file"
        )
    return path.read_bytes()


def read_tokenizer_files(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Read a vocab.txt or tokenizer.json. Return its back end and each special token's text ("cls" -> "[CLS]").

    A .json file is read as tokenizer.json, others as vocab.txt. The folder's tokenizer_config.json is read too. Raise
    DataError if a file is damaged, ids have gaps or duplicates, or a special token is missing.
    """
    config = read_tokenizer_config(path.parent)
    backend = _read_tokenizer_json(path) if path.suffix == ".json" else _read_vocab_txt(path, config)
    names, missing = choose_special_names(backend.get_vocab(), path.parent, STANDARD_NAMES)
    if missing:
        raise DataError(
            f"{path}: {', '.join(missing)} missing among {backend.get_vocab_size()} ids; training needs [CLS], [SEP], "
            "[PAD], [MASK] and [UNK] (or <s>, </s>, <pad>, <mask>, <unk>). Add them with add_special_tokens of the "
            "tokenizers library, or train a vocabulary with neobert train-tokenizer"
        )
    return backend, names


def build_bert_backend(
    model: models.WordPiece, *, lowercase: bool, strip_accents: bool | None = None, chinese_characters: bool = True
) -> tokenizers.Tokenizer:
    """Return BERT's pipeline for a WordPiece model: clean a text, split it at spaces and punctuation, encode, decode.

    [CLS] and [SEP] are not added. If `strip_accents` is None, `lowercase` decides. With `chinese_characters`,
    Chinese text is split into single characters.
    """
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese_characters, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _read_vocab_txt(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    content = read_whole(path).removeprefix(b"\xef\xbb\xbf")
    try:
        pieces = content.decode().split("\n")  # not splitlines: pieces like U+2028 exist
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line} is not UTF-8 ({error.reason}); a vocab.txt is UTF-8 text. Name a vocab.txt"
        ) from error
    if not pieces[-1]:
        pieces.pop()
    vocabulary: dict[str, int] = {}
    for id_, piece in enumerate(piece.removesuffix("\r") for piece in pieces):
        if not piece:
            raise DataError(
                f"{path}, line {id_ + 1} is empty, but each line of a vocab.txt is one piece; correct the file"
            )
        if vocabulary.setdefault(piece, id_) != id_:
            raise DataError(
                f"{path}, line {id_ + 1}: '{piece}' is also on line {vocabulary[piece] + 1}, but each piece has one "
                "id; correct the file"
            )
    lowercase = config.get("do_lower_case")
    if lowercase is None:
        # bert-base-uncased has ℝ, for which isupper() is True although lower() does not change it.
        ordinary = (piece for piece in vocabulary if piece[0] + piece[-1] not in ("[]", "<>"))
        lowercase = all(piece == piece.lower() for piece in ordinary)
    unknown = next((name for name in STANDARD_NAMES["unk"] if name in vocabulary), STANDARD_NAMES["unk"][0])
    return build_bert_backend(
        models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100),
        lowercase=lowercase,
        strip_accents=config.get("strip_accents"),
        chinese_characters=config.get("tokenize_chinese_chars") is not False,
    )


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    state = _read_json_object(path)
    # Anywhere in the normalizer, which may be a tree. json.dumps escapes quotation marks within texts.
    for text in re.findall(r'"precompiled_charsmap": "([^"]*)"', json.dumps(state.get("normalizer"))):
        try:
            rules = base64.b64decode(text, validate=True)
        except ValueError:
            rules = b""
        if not is_character_map(rules):
            raise DataError(f"{path}: precompiled_charsmap is truncated or damaged; fetch the file again")
    # The template of a post-processor may leave out the text itself, even without special tokens.
    state.pop("post_processor", None)
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    except BaseException as error:
        raise_unless_library(error)
        raise DataError(
            f"{path}: not a tokenizer.json ({error}); export it again with the tokenizers library"
        ) from error
    for token in state.get("added_tokens", []):
        loaded = backend.token_to_id(token["content"])
        if loaded != token["id"]:
            raise DataError(
                f"{path}: the added token '{token['content']}' has id {token['id']} instead of {loaded}; ids of added "
                "tokens follow the vocabulary without gaps. Export the tokenizer again"
            )
    backend.no_truncation()
    backend.no_padding()
    pieces: dict[int, str] = {}
    for piece, id_ in backend.get_vocab(with_added_tokens=True).items():
        if pieces.setdefault(id_, piece) != piece:
            raise DataError(f"{path}: '{pieces[id_]}' and '{piece}' both have id {id_}; give each piece another id")
    missing = next((id_ for id_ in range(len(pieces)) if id_ not in pieces), None)
    if missing is not None:
        raise DataError(
            f"{path}: id {missing} is missing, but the largest id is {max(pieces)}; ids must be 0 to "
            f"{len(pieces) - 1} without gaps. Add unused pieces for the missing ids"
        )
    return backend


def raise_unless_library(error: BaseException) -> None:
    """Raise `error` again unless it is an Exception or PanicException, which the tokenizers library raises."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def is_character_map(rules: bytes) -> bool:
    """Return True if SentencePiece's compiled rules contain valid lengths. Invalid lengths would abort the library."""
    if len(rules) < 4:
        return False
    (table_bytes,) = struct.unpack_from("<I", rules)
    return table_bytes % 4 == 0 and 4 + table_bytes <= len(rules)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return special_tokens_map.json, updated by tokenizer_config.json. A missing file counts as empty.

    Raise DataError if a file is damaged, needs Python code of the tokenizer, or has a setting of the wrong type.
    """
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= _read_json_object(folder / name)
    if "AutoTokenizer" in str(config.get("auto_map")):
        raise DataError(
            f"{folder / 'tokenizer_config.json'}: auto_map names Python code of the tokenizer, which is never "
            "executed; save the tokenizer as a tokenizer.json, and remove auto_map"
        )
    for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        if not isinstance(config.get(name), (bool, type(None))):
            raise DataError(
                f"{folder / 'tokenizer_config.json'}: {name} is {json.dumps(config[name])[:80]}, but must be true, "
                "false or null; correct it"
            )
    return config


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_whole(path).decode())
    except ValueError as error:
        raise DataError(f"{path}: not readable as JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(content).__name__}; fetch the file again")
    return content


def choose_special_names(
    pieces: Collection[str], folder: Path, candidates: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], list[str]]:
    """Return {role: special token's name}, and the names that are missing in `pieces`, shortened for a message.

    A role's name comes from the folder's tokenizer_config.json, else it is the role's first candidate in `pieces`, else
    the last candidate. Raise DataError if tokenizer_config.json is damaged or contains an invalid name.
    """
    config = read_tokenizer_config(folder)
    names: dict[str, str] = {}
    missing = []
    for role, candidate_names in candidates.items():
        declared: Any = config.get(f"{role}_token")
        # Hugging Face writes an AddedToken as an object.
        if isinstance(declared, dict):
            declared = declared.get("content") or declared
        # JSON can encode a lone surrogate, which no vocabulary can have.
        is_name = isinstance(declared, str) and declared and declared == declared.encode("utf-8", "ignore").decode()
        if declared is not None and not is_name:
            raise DataError(
                f"{folder / 'tokenizer_config.json'}: {role}_token is {json.dumps(declared)[:80]}, but must be the "
                "name of a token; correct it"
            )
        existing = [name for name in ([declared] if declared else candidate_names) if name in pieces]
        names[role] = declared or (existing[0] if existing else candidate_names[-1])
        if not existing:
            missing.append(visible(declared or candidate_names[0])[:80])
    return names, missing
