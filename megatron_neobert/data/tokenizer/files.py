"""Reading of tokenizer files, and the checks that spare later stages an obscure failure.

Every problem names the file and, where there is one, the line. Nothing is downloaded and no code of a tokenizer is run.
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

from megatron_neobert.config.schema import TOKENIZER_TYPES
from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.text import parse_json, visible

# Names of the special tokens where no tokenizer_config.json gives others: BERT's, then RoBERTa's.
STANDARD_NAMES = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}

_LARGEST_FILE_BYTES = 512 << 20  # a vocabulary of a million pieces takes 100 MB

# The files of a folder that each of config.TOKENIZER_TYPES takes, best first.
_FILE_NAMES = {
    "auto": ("tokenizer.json", "vocab.txt", "tokenizer.model", "spiece.model"),
    "BertWordPieceLowerCase": ("vocab.txt",),
    "BertWordPieceCase": ("vocab.txt",),
    "HuggingFaceTokenizer": ("tokenizer.json", "vocab.txt"),
    "SentencePieceTokenizer": ("tokenizer.model", "spiece.model"),
}


def find_tokenizer_file(path: Path, tokenizer_type: str) -> Path:
    """The file to read: the path itself, or the best of a folder.

    Raises:
        ConfigError: There is no such type, or the file is of another.
        MissingInputError: There is no such file or folder, or the folder holds nothing suitable.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} does not exist; use one of {', '.join(TOKENIZER_TYPES)}")
    wanted = _FILE_NAMES[tokenizer_type]
    if path.is_dir():
        found = next((path / name for name in wanted if (path / name).is_file()), None)
        if found is None:
            raise MissingInputError(
                f"--tokenizer-model {path} holds none of {', '.join(wanted)}; name a folder or file that does"
            )
        return found
    if not path.is_file():
        raise MissingInputError(
            f"--tokenizer-model {path}: no such file or folder; nothing is downloaded, so name a local vocab.txt, "
            "tokenizer.json or SentencePiece model, or a folder that holds one"
        )
    fitting: tuple[str, ...]
    if path.suffix == ".json":
        kind, fitting = "a tokenizer.json", ("HuggingFaceTokenizer",)
    elif is_sentencepiece(path):
        kind, fitting = "a SentencePiece model", ("SentencePieceTokenizer",)
    else:
        kind, fitting = "a WordPiece vocabulary", ("BertWordPieceLowerCase", "BertWordPieceCase")
    if tokenizer_type not in ("auto", *fitting):
        raise ConfigError(
            f"--tokenizer-type {tokenizer_type} does not fit {path}, which is {kind}; use auto, {' or '.join(fitting)}"
        )
    return path


def is_sentencepiece(path: Path) -> bool:
    """Return True for a SentencePiece model, by its name or by the first bytes of its protobuf message."""
    with path.open("rb") as file:
        head = file.read(3)
    return path.suffix == ".model" or head[:1] == head[2:] == b"\n"


def read_whole(path: Path) -> bytes:
    """The content of a tokenizer's file.

    Raises:
        DataError: It is larger than any tokenizer: a corpus, or weights.
    """
    if (size := path.stat().st_size) > _LARGEST_FILE_BYTES:
        raise DataError(f"{path}: {size:,} bytes are more than {_LARGEST_FILE_BYTES:,}; that is no tokenizer's file")
    return path.read_bytes()


def read_tokenizer_files(path: Path, tokenizer_type: str) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The back end of a vocab.txt or tokenizer.json, and the name of each special token ("cls" -> "[CLS]").

    Raises:
        ConfigError: The type contradicts the file about upper and lower case.
        DataError: A file is damaged, ids have gaps or duplicates, or a special token is missing.
    """
    config = read_tokenizer_config(path.parent)
    backend = _read_tokenizer_json(path) if path.suffix == ".json" else _read_vocab_txt(path, config, tokenizer_type)
    return backend, _find_special_names(backend, path)


def build_bert_backend(
    model: models.WordPiece, *, lowercase: bool, strip_accents: bool | None = None, chinese_characters: bool = True
) -> tokenizers.Tokenizer:
    """BERT's pipeline round a WordPiece model: clean, lower-case and strip accents if uncased, split at punctuation."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese_characters, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


def _read_vocab_txt(path: Path, config: dict[str, Any], tokenizer_type: str) -> tokenizers.Tokenizer:
    content = read_whole(path).removeprefix(b"\xef\xbb\xbf")
    try:
        pieces = content.decode().split("\n")  # not splitlines: pieces like U+2028 exist
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason}); is it a vocab.txt at all?") from error
    if not pieces[-1]:
        pieces.pop()
    if pieces and re.match(r'\s*\{\s*"', pieces[0]):
        raise DataError(
            f"{path}, line 1: a JSON object and no piece of a vocab.txt, which has one on each line; name a "
            "tokenizer's file (a tokenizer.json by a name that ends in .json)"
        )
    vocabulary: dict[str, int] = {}
    for id_, piece in enumerate(piece.removesuffix("\r") for piece in pieces):
        if not piece:
            raise DataError(
                f"{path}, line {id_ + 1}: empty; every line is one piece and its number is the id. Restore the file"
            )
        if vocabulary.setdefault(piece, id_) != id_:
            raise DataError(
                f"{path}, line {id_ + 1}: '{piece}' stands on line {vocabulary[piece] + 1} too; every piece needs one "
                "id. Restore the file"
            )
    unknown = next((name for name in STANDARD_NAMES["unk"] if name in vocabulary), STANDARD_NAMES["unk"][0])
    return build_bert_backend(
        models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100),
        lowercase=_choose_lower_case(path, list(vocabulary), config.get("do_lower_case"), tokenizer_type),
        strip_accents=config.get("strip_accents"),
        chinese_characters=config.get("tokenize_chinese_chars") is not False,
    )


def _choose_lower_case(path: Path, pieces: list[str], declared: bool | None, tokenizer_type: str) -> bool:
    # Not isupper(): bert-base-uncased has ℝ, which lower() keeps.
    upper = [piece for piece in pieces if piece != piece.lower() and piece[0] + piece[-1] not in ("[]", "<>")]
    if not tokenizer_type.startswith("BertWordPiece"):
        return not upper if declared is None else bool(declared)
    lower_case = tokenizer_type == "BertWordPieceLowerCase"
    if declared is not None and bool(declared) != lower_case:
        raise ConfigError(
            f"--tokenizer-type {tokenizer_type} contradicts {path.parent / 'tokenizer_config.json'}, which says "
            f"do_lower_case {json.dumps(declared)}; change one of them, or leave the type to auto"
        )
    if lower_case and len(upper) * 100 > len(pieces):  # a few occur in uncased vocabularies, as letters of old scripts
        raise ConfigError(
            f"--tokenizer-type {tokenizer_type} does not fit {path}: {len(upper):,} of {len(pieces):,} pieces have "
            f"upper-case letters ('{upper[0]}') and could never occur; use BertWordPieceCase"
        )
    return lower_case


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    state = _read_json_object(path)
    for rules in _find_character_maps(state.get("normalizer")):
        if not is_character_map(rules):
            raise DataError(f"{path}: precompiled_charsmap is cut off or damaged; fetch the file again")
    if "post_processor" in state:  # its template can leave out the text itself, also where no special tokens are wanted
        state["post_processor"] = None
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    except BaseException as error:
        raise_unless_library(error)
        raise DataError(f"{path}: not a tokenizer.json ({error}); save it again with the tokenizers library") from error
    for token in state.get("added_tokens", []):
        loaded = backend.token_to_id(token["content"])
        if loaded != token["id"]:
            raise DataError(
                f"{path}: added token '{token['content']}' claims id {token['id']}, but its id can only be {loaded}; "
                "added tokens follow the vocabulary without gaps. Save the tokenizer again"
            )
    backend.no_truncation()
    backend.no_padding()
    _check_ids(backend, path)
    return backend


def raise_unless_library(error: BaseException) -> None:
    """Passes on what the tokenizers library does not raise: it knows Exception and, from Rust, PanicException."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def _find_character_maps(normalizer: Any) -> list[bytes]:
    """SentencePiece's compiled rules in a normalizer; those that are not base64 as empty, which no map is."""
    maps = []
    waiting = [normalizer]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, list):
            waiting += entry
        elif isinstance(entry, dict):
            if isinstance(text := entry.get("precompiled_charsmap"), str):
                try:
                    maps.append(base64.b64decode(text, validate=True))
                except ValueError:
                    maps.append(b"")
            waiting += entry.values()
    return maps


def is_character_map(rules: bytes) -> bool:
    """Return True if the lengths in SentencePiece's compiled rules add up; the library aborts on wrong ones."""
    if len(rules) < 4:
        return False
    (table_bytes,) = struct.unpack_from("<I", rules)
    return table_bytes % 4 == 0 and 4 + table_bytes <= len(rules)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json and tokenizer_config.json of a folder as one dictionary; the latter wins."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= _read_json_object(folder / name)
    if "AutoTokenizer" in str(config.get("auto_map")):
        raise DataError(
            f"{folder / 'tokenizer_config.json'}: auto_map asks for the tokenizer's own Python code, which is never "
            "run; save it as a tokenizer.json, and remove auto_map"
        )
    for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        if not isinstance(config.get(name), (bool, type(None))):
            raise DataError(
                f"{folder / 'tokenizer_config.json'}: expected {name} to be true, false or null, found "
                f"{json.dumps(config[name])[:80]}; correct it"
            )
    return config


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_whole(path).decode())
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}); cut off? Fetch it again"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; fetch it again") from error
    except ValueError as error:
        raise DataError(f"{path}: not readable as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(content).__name__}; fetch it again")
    return content


def _check_ids(backend: tokenizers.Tokenizer, path: Path) -> None:
    pieces: dict[int, str] = {}
    for piece, id_ in backend.get_vocab(with_added_tokens=True).items():
        if id_ in pieces:
            raise DataError(
                f"{path}: id {id_} belongs to '{pieces[id_]}' and to '{piece}'; every piece needs its own id"
            )
        pieces[id_] = piece
    missing = next((id_ for id_ in range(len(pieces)) if id_ not in pieces), None)
    if missing is not None:
        raise DataError(
            f"{path}: id {missing} is missing although ids go up to {max(pieces)}; ids must be 0 to "
            f"{len(pieces) - 1} without gaps. Give the free ids to unused pieces"
        )


def choose_special_names(
    known: Collection[str], folder: Path, usual: Mapping[str, Sequence[str]]
) -> tuple[dict[str, str], list[str]]:
    """Return the names of the special tokens by role, and the names that are needed but not among the pieces.

    The tokenizer_config.json of the folder decides where it names a role's token; else the first usual name that is
    known does, or the last one if none is.
    """
    config = read_tokenizer_config(folder)
    names: dict[str, str] = {}
    missing = []
    for role, candidates in usual.items():
        declared: Any = config.get(f"{role}_token")
        if isinstance(declared, dict):  # an AddedToken as Hugging Face writes it
            declared = declared.get("content") or declared
        # JSON can name half a character, which no file holds.
        is_name = isinstance(declared, str) and declared and declared == declared.encode("utf-8", "ignore").decode()
        if declared is not None and not is_name:
            raise DataError(
                f"{folder / 'tokenizer_config.json'}: expected {role}_token to be the name of a token, found "
                f"{json.dumps(declared)[:80]}; correct it"
            )
        found = [name for name in ([declared] if declared else candidates) if name in known]
        names[role] = declared or (found or candidates)[0 if found else -1]
        if not found:
            missing.append(visible(declared or candidates[0])[:80])
    return names, missing


def _find_special_names(backend: tokenizers.Tokenizer, path: Path) -> dict[str, str]:
    names, missing = choose_special_names(backend.get_vocab(), path.parent, STANDARD_NAMES)
    if missing:
        raise DataError(
            f"{path}: {', '.join(missing)} missing among {backend.get_vocab_size()} ids; training needs "
            "[CLS], [SEP], [PAD], [MASK] and [UNK] (or <s>, </s>, <pad>, <mask>, <unk>). Add them with "
            "add_special_tokens of the tokenizers library and save, or train a vocabulary with neobert train-tokenizer"
        )
    return names
