"""Reading of tokenizer files, and the checks that spare later stages an obscure failure.

Every problem names the file and, where there is one, the line. Nothing is downloaded and no code of a tokenizer is run.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron_neobert.errors import DataError, MissingInputError

# Names of the special tokens where no tokenizer_config.json gives others: BERT's, then RoBERTa's.
STANDARD_NAMES = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}


def read_tokenizer_files(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The backend of a vocab.txt, a tokenizer.json or a folder, and the name of each special token ("cls" -> "[CLS]").

    Raises:
        MissingInputError: There is no such file or folder, or the folder holds neither file.
        DataError: A file is damaged, ids have gaps or duplicates, or a special token is missing.
    """
    if path.is_dir():
        found = [file for file in (path / "tokenizer.json", path / "vocab.txt") if file.is_file()]
        if not found:
            raise MissingInputError(
                f"--tokenizer-model {path} holds neither tokenizer.json nor vocab.txt; name one that does"
            )
        path = found[0]
    if not path.is_file():
        raise MissingInputError(
            f"--tokenizer-model {path}: no such file or folder; nothing is downloaded, so name a local vocab.txt, "
            "tokenizer.json, or a folder that holds one"
        )
    config = _read_config(path.parent)
    backend = _read_tokenizer_json(path) if path.suffix == ".json" else _read_vocab_txt(path, config)
    _check_ids(backend, path)
    return backend, _find_special_names(backend, path, config)


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


def _read_vocab_txt(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    vocabulary: dict[str, int] = {}
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")  # not splitlines: pieces like U+2028 exist
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            piece = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason}); is it a vocab.txt at all?") from error
        if not piece:
            raise DataError(
                f"{path}, line {number}: empty; every line is one piece and its number is the id. Restore the file"
            )
        if piece in vocabulary:
            raise DataError(
                f"{path}, line {number}: '{piece}' stands on line {vocabulary[piece] + 1} too; "
                "every piece needs one id. Restore the file"
            )
        vocabulary[piece] = number - 1
    lowercase = config.get("do_lower_case")
    unknown = next((name for name in STANDARD_NAMES["unk"] if name in vocabulary), STANDARD_NAMES["unk"][0])
    return build_bert_backend(
        models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100),
        lowercase=_is_uncased(vocabulary) if lowercase is None else bool(lowercase),
        strip_accents=config.get("strip_accents"),
        chinese_characters=config.get("tokenize_chinese_chars", True),
    )


def _is_uncased(vocabulary: dict[str, int]) -> bool:
    ordinary = (piece for piece in vocabulary if piece[0] + piece[-1] not in ("[]", "<>"))
    return all(
        piece == piece.lower() for piece in ordinary
    )  # not isupper(): bert-base-uncased has ℝ, which lower() keeps


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    state = _read_json_object(path)
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    except Exception as error:  # the library raises nothing more precise
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
    return backend


def _read_config(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json and tokenizer_config.json of a folder as one dictionary; the latter wins."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= _read_json_object(folder / name)
    if "AutoTokenizer" in (config.get("auto_map") or {}):
        raise DataError(
            f"{folder / 'tokenizer_config.json'}: auto_map asks for the tokenizer's own Python code, which is never "
            "run; save it as a tokenizer.json, and remove auto_map"
        )
    return config


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}); cut off? Fetch it again"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}; fetch it again") from error
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


def _find_special_names(backend: tokenizers.Tokenizer, path: Path, config: dict[str, Any]) -> dict[str, str]:
    names, missing = {}, []
    for role, standard in STANDARD_NAMES.items():
        declared = config.get(f"{role}_token")
        if isinstance(declared, dict):  # an AddedToken as Hugging Face writes it
            declared = declared.get("content")
        candidates = (declared,) if isinstance(declared, str) else standard
        known = [name for name in candidates if backend.token_to_id(name) is not None]
        if known:
            names[role] = known[0]
        else:
            missing.append(candidates[0])
    if missing:
        raise DataError(
            f"{path}: {', '.join(missing)} missing among {backend.get_vocab_size()} ids; training needs "
            "[CLS], [SEP], [PAD], [MASK] and [UNK] (or <s>, </s>, <pad>, <mask>, <unk>). Add them with "
            "add_special_tokens of the tokenizers library and save, or train a vocabulary with tools/train_tokenizer.py"
        )
    return names
