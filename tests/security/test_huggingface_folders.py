"""Hostile Hugging Face folders: hf-to-megatron and verify run nothing of them and trust no size.

What could run code is given to the commands; what can only lie is given to the function behind hf-to-megatron.
"""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import Canary, call
from processes import Ended, run_command
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, EuroBertConfig, EuroBertForMaskedLM

from checkpoint_conversion.imports import import_folder
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import NeoBERTError
from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTForMaskedLM

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *"abcdefghijk"]
TINY = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": 4,
}
Start, Command = Callable[..., Ended], Callable[[Path], Ended]
WEIGHT = "model.layers.0.self_attn.q_proj.weight"  # any of them


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("published") / "model"
    EuroBertForMaskedLM(EuroBertConfig(**TINY, intermediate_size=8, mlp_bias=True)).save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "model")
    return tmp_path / "model"


def write_tokenizer(folder: Path, words: list[str]) -> None:
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    load_tokenizer(folder / "vocab.txt").save_tokenizer_files(folder, model_max_length=32)


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def convert(folder: Path, start: Start = call) -> Ended:
    words = ("hf-to-megatron", "--load", folder, "--output", folder.parent / "imported")
    return start("checkpoint_conversion.convert", *words)


def verify(folder: Path) -> Ended:
    return call("megatron_neobert.__main__", "verify", folder, folder)


def assert_refused(folder: Path, *words: str, code: int = 78, commands: Sequence[Command] = (convert, verify)) -> None:
    """The commands end with one sentence with these words, this exit code, and nothing written."""
    for command in commands:
        result = command(folder)
        assert result.refused(code), result.output
        assert_says(result.errors[0], words)
        assert_nothing_written(folder)


def assert_lie_refused(folder: Path, *words: str, code: int = 78) -> None:
    """The same of the function behind `convert`."""
    with pytest.raises(NeoBERTError) as caught:
        import_folder(folder, folder.parent / "imported")
    assert caught.value.exit_code == code
    assert_says(str(caught.value), words)
    assert_nothing_written(folder)


def assert_says(sentence: str, words: tuple[str, ...]) -> None:
    assert [word for word in words if word not in sentence] == [], sentence
    assert sentence.isprintable(), "the folder's words reach the terminal as they are"


def assert_nothing_written(folder: Path) -> None:
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith("imported")] == []


def assert_imported(folder: Path, start: Start = call) -> None:
    result = convert(folder, start)
    assert result.code == 0, result.output
    assert (folder.parent / "imported" / "latest_checkpointed_iteration.txt").is_file()


# --- code ---


def test_untouched_folder_is_imported_and_equal_to_itself(folder: Path):
    assert_imported(folder, run_command)
    assert verify(folder).code == 0


def add_code(folder: Path, canary: Canary, model_type: str) -> None:
    (folder / "own_code.py").write_text(
        f"{canary.source}from transformers import EuroBertConfig, EuroBertForMaskedLM\n"
        f"class OwnConfig(EuroBertConfig): model_type = '{model_type}'\n"
        "class Own(EuroBertForMaskedLM): config_class = OwnConfig\n"
    )
    classes = {"AutoConfig": "own_code.OwnConfig", "AutoModelForMaskedLM": "own_code.Own"}
    change_json(folder / "config.json", model_type=model_type, auto_map=classes, trust_remote_code=True)


def test_architecture_with_its_own_code_is_refused(folder: Path, canary: Canary):
    add_code(folder, canary, "own_model")
    assert_refused(folder, "model_type is 'own_model'", "eurobert, neobert, llama", commands=[convert])
    assert_refused(folder, commands=[verify])
    assert not canary.has_run
    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert canary.has_run


def test_code_beside_a_model_that_transformers_has_is_left_alone(folder: Path, canary: Canary):
    add_code(folder, canary, "eurobert")
    assert_imported(folder)
    assert verify(folder).code == 0
    assert not canary.has_run


@pytest.mark.usefixtures("only_remote_code")
def test_code_that_a_neobert_folder_brings_is_left_alone(folder: Path, canary: Canary):
    config = NeoBERTConfig(**TINY, intermediate_size=12, dim_head=8)
    (folder / "model.safetensors").unlink()
    NeoBERTForMaskedLM(config).save_pretrained(folder)
    (folder / "own_code.py").write_text(
        f"{canary.source}from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTForMaskedLM\n"
    )
    classes = {"AutoConfig": "own_code.NeoBERTConfig", "AutoModelForMaskedLM": "own_code.NeoBERTForMaskedLM"}
    change_json(folder / "config.json", auto_map=classes, trust_remote_code=True)
    assert_imported(folder, run_command)  # which registers our class, in a process of its own
    assert not canary.has_run
    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert canary.has_run


def test_tokenizer_with_its_own_code_is_refused(folder: Path, canary: Canary):
    (folder / "own_code.py").write_text(
        f"{canary.source}from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    )
    change_json(
        folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own_code.Own"]}, tokenizer_class="Own"
    )
    assert_refused(folder, "the tokenizer's own Python code, which is never run", code=65, commands=[convert])
    assert not canary.has_run
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert canary.has_run


@pytest.mark.parametrize("name", ["pytorch_model.bin", "state_dict.pt"])
def test_pickled_weights_are_refused_unread(folder: Path, canary: Canary, name: str):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.bias": canary}, folder / name)
    assert_refused(folder, name, "save the state dict as model.safetensors")
    (folder / "model.safetensors").write_bytes(pickle.dumps(canary))
    assert_refused(folder, "model.safetensors: not a safetensors file")
    assert not canary.has_run
    torch.load(folder / name, weights_only=False)
    assert canary.has_run


def test_adapter_that_belongs_to_another_model_is_refused(folder: Path):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": os.fspath(folder.parent)}))
    assert_refused(folder, "an adapter changes a model that lies elsewhere")


# --- which file ---


@pytest.mark.parametrize(
    "outside", ["../outside.safetensors", "/etc/outside.safetensors", "sub/w.safetensors", "w.bin"]
)
def test_weights_outside_the_folder_are_refused(folder: Path, outside: str):
    name_weights(folder, outside)
    assert_refused(folder, f"shall be read from {outside!r}, which is no safetensors file of the folder")


def name_weights(folder: Path, outside: str) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, outside)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_transformers_would_read_weights_outside_the_folder(folder: Path):
    """The control of the test above."""
    name_weights(folder, "../outside.safetensors")
    assert AutoModelForMaskedLM.from_pretrained(folder).config.vocab_size == len(WORDS)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_attention_that_would_be_fetched_is_refused(folder: Path, key: str):
    change_json(folder / "config.json", **{key: "somebody/kernel"})
    assert_refused(folder, f"{key} is 'somebody/kernel', which transformers may fetch code for")


def test_weights_that_the_config_names_outside_the_folder_are_refused(folder: Path):
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    change_json(folder / "config.json", transformers_weights="../outside.safetensors")
    assert_lie_refused(folder, "transformers_weights")


@pytest.mark.parametrize("key", ["return_dict", "output_hidden_states"])
def test_wish_for_another_kind_of_output_is_not_obeyed(folder: Path, key: str):
    change_json(folder / "config.json", **{key: False if key == "return_dict" else 0.5})
    assert_imported(folder)


# --- what the weights' header claims ---


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(path: Path, header: bytes, data: bytes, *, claimed: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if claimed is None else claimed) + header + data)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [10**6, 10**6]},
        {"shape": [2**63, 2]},
        {"shape": [-8, -8]},
        {"data_offsets": [0, 10**15]},
        {"data_offsets": [10**15, 10**15 + 256]},
        {"data_offsets": [0, 256]},  # another tensor's
        {"dtype": "X128"},
        {"dtype": "F64"},
    ],
    ids=str,
)
def test_header_that_contradicts_itself_is_refused(folder: Path, changes: dict[str, Any]):
    path = folder / "model.safetensors"
    header, data = read_header(path)
    header[WEIGHT] |= changes
    write_header(path, json.dumps(header).encode(), data)
    assert_lie_refused(folder, "model.safetensors: not a safetensors file")


@pytest.mark.parametrize(
    ("header", "claimed"),
    [(b"{}", 2**63), (b"{}", 90_000_000), (b"[" * 100_000, None), (b'{"a": 1}', None), (b"", None)],
    ids=["huge", "longer than the file", "nested", "no tensors", "empty"],
)
def test_header_that_is_none_is_refused(folder: Path, header: bytes, claimed: int | None):
    write_header(folder / "model.safetensors", header, b"", claimed=claimed)
    assert_lie_refused(folder, "model.safetensors: not a safetensors file")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda tensor: tensor.int(),
            ("is stored as torch.int32", "only torch.float32, torch.bfloat16,"),
        ),
        (lambda tensor: tensor.double(), ("is stored as torch.float64",)),
        (lambda tensor: tensor.to(torch.float8_e4m3fn), ("is stored as torch.float8_e4m3fn",)),
        (lambda tensor: tensor[:4].contiguous(), ("has shape (4, 8)", "give it (8, 8)")),
        (lambda tensor: tensor.reshape(1, 8, 8), ("has shape (1, 8, 8)",)),
        (lambda tensor: tensor * float("nan"), ("finite",)),
        (lambda tensor: tensor + float("inf"), ("finite",)),
    ],
    ids=["integers", "float64", "float8", "too small", "three dimensions", "NaN", "infinite"],
)
def test_weights_that_cannot_be_trained_are_refused_by_name(folder: Path, spoil, words):
    tensors = load_file(folder / "model.safetensors")
    tensors[WEIGHT] = spoil(tensors[WEIGHT])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_lie_refused(folder, *words)


def test_name_of_a_tensor_cannot_command_the_terminal(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    tensors["\x1b[2J\x1b]0;owned\x07"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_lie_refused(folder, "NeoBERT has no place for", r"\x1b[2J")


# --- what config.json claims ---


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1,000,000"),
        ({"hidden_size": 10**40}, "a whole number from 1 to 2,147,483,647"),
        ({"hidden_size": 2**30, "head_dim": 2**30}, "give it"),
        ({"intermediate_size": 2**31 - 1}, "give it (8, 2147483647)"),
        ({"vocab_size": 10**9}, "give it (1000000000,)"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta is inf"),
        ({"num_labels": 10**6}, "num_labels is 1000000"),  # transformers gives each of them a name
        ({"hidden_act": "\x1b[31m"}, "hidden_act is '\\x1b[31m'"),
        ({"model_type": {"a": {}}}, "model_type is of 1 entries"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_config_that_claims_nonsense_is_refused(folder: Path, changes, words):
    change_json(folder / "config.json", **changes)
    assert_lie_refused(folder, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"3", "expected a JSON object, found int"),
        (b'{"vocab_size": 16, "vocab_size": 17}', "'vocab_size' is there twice"),
    ],
    ids=["nested", "not UTF-8", "number", "twice"],
)
def test_config_that_is_none_is_refused(folder: Path, content: bytes, words: str):
    (folder / "config.json").write_bytes(content)
    assert_lie_refused(folder, "config.json", words)
    assert_refused(folder, commands=[verify])


def test_giant_config_is_not_read(folder: Path):
    os.truncate(folder / "config.json", 2**40)  # a hole; it takes no space
    assert_lie_refused(folder, "1,099,511,627,776 bytes are more than")


# --- the tokenizer ---


@pytest.mark.parametrize("words", [WORDS[:-1], [*WORDS, "l"]], ids=["smaller", "larger"])
def test_tokenizer_of_another_size_is_refused_with_both_numbers(folder: Path, words: list[str]):
    write_tokenizer(folder, words)
    assert_lie_refused(folder, f"the tokenizer has {len(words)} ids and the embedding {len(WORDS)} rows")


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\xff", b'{"model": {"type": "Own"}}'])
def test_tokenizer_that_is_none_is_refused(folder: Path, content: bytes):
    (folder / "tokenizer.json").write_bytes(content)
    assert_lie_refused(folder, "tokenizer.json", code=65)
