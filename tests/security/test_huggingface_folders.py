"""Hugging Face folders whose files lie about names, sizes or places are refused by hf-to-megatron.

test_every_reader.py has folders that would run code.
"""

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import good_inputs as good
import pytest
import torch
from good_inputs import WORDS
from hostile import Canary
from processes import run_command
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from checkpoint_conversion.imports import import_folder
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import NeoBERTError
from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTForMaskedLM

WEIGHT = "model.layers.0.self_attn.q_proj.weight"  # any of them


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good.write_model(tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_refused(folder: Path, *words: str) -> None:
    """Assert that the import fails with code 78 and a printable sentence with these words, and writes nothing."""
    with pytest.raises(NeoBERTError) as caught:
        import_folder(folder, folder.parent / "imported")
    assert caught.value.exit_code == 78
    sentence = str(caught.value)
    assert [word for word in words if word not in sentence] == [], sentence
    assert sentence.isprintable(), "words of the folder reach the terminal as they are"
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith("imported")] == []


@pytest.mark.usefixtures("only_remote_code")
def test_code_that_a_neobert_folder_brings_is_left_alone(folder: Path, canary: Canary):
    changed = ("model_type", "architectures", "hidden_act", "intermediate_size", "head_dim", "mlp_bias")
    sizes = {
        key: value for key, value in json.loads((folder / "config.json").read_text()).items() if key not in changed
    }
    (folder / "model.safetensors").unlink()
    NeoBERTForMaskedLM(NeoBERTConfig(**sizes, intermediate_size=12, dim_head=8)).save_pretrained(folder)
    (folder / "own_code.py").write_text(
        f"{canary.source}from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTForMaskedLM\n"
    )
    classes = {"AutoConfig": "own_code.NeoBERTConfig", "AutoModelForMaskedLM": "own_code.NeoBERTForMaskedLM"}
    change_json(folder / "config.json", auto_map=classes, trust_remote_code=True)
    words = ("hf-to-megatron", "--load", folder, "--output", folder.parent / "imported")
    result = run_command("checkpoint_conversion.convert", *words)  # registers our class, in a process of its own
    assert result.code == 0, result.output
    assert not canary.has_run
    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert canary.has_run


@pytest.mark.parametrize("outside", ["../outside.safetensors", "/etc/w.safetensors", "sub/w.safetensors", "w.bin"])
def test_weights_outside_the_folder_are_refused(folder: Path, outside: str):
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, outside)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if outside.startswith(".."):  # the control: transformers reads them
        assert AutoModelForMaskedLM.from_pretrained(folder).config.vocab_size == len(WORDS)
    assert_refused(folder, f"shall be read from {outside!r}, which is no safetensors file of the folder")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_attention_that_would_be_fetched_is_refused(folder: Path, key: str):
    change_json(folder / "config.json", **{key: "somebody/kernel"})
    assert_refused(folder, f"{key} is 'somebody/kernel', which transformers may fetch code for")


def change_header(folder: Path, **changes: object) -> bytes:
    """Return the weights' file with other claims about one tensor."""
    content = (folder / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    header[WEIGHT] |= changes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[end:]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_header(folder, shape=[2**63, 2]),
        lambda folder: change_header(folder, shape=[-8, -8]),
        lambda folder: change_header(folder, data_offsets=[0, 10**15]),
        lambda folder: change_header(folder, data_offsets=[0, 256]),  # another tensor's
        lambda folder: struct.pack("<Q", 2**63) + b"{}",
        lambda folder: struct.pack("<Q", 100_000) + b"[" * 100_000,
    ],
    ids=["huge", "negative", "beyond the end", "another tensor's", "longer than the file", "nested"],
)
def test_header_that_contradicts_itself_is_refused(folder: Path, change):
    (folder / "model.safetensors").write_bytes(change(folder))
    assert_refused(folder, "model.safetensors: not a safetensors file")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda tensor: tensor.int(), ("is stored as torch.int32", "only torch.float32, torch.bfloat16,")),
        (lambda tensor: tensor[:4].contiguous(), ("has shape (4, 8)", "give it (8, 8)")),
        (lambda tensor: tensor * float("nan"), ("finite",)),
    ],
    ids=["integers", "too small", "NaN"],
)
def test_weights_that_cannot_be_trained_are_refused_by_name(folder: Path, spoil, words):
    tensors = load_file(folder / "model.safetensors")
    tensors[WEIGHT] = spoil(tensors[WEIGHT])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(folder, *words)


def test_name_of_a_tensor_cannot_command_the_terminal(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    tensors["\x1b[2J\x1b]0;owned\x07"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_refused(folder, "NeoBERT has no place for", r"\x1b[2J")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1,000,000"),
        ({"intermediate_size": 2**31 - 1}, "give it (8, 2147483647)"),
        ({"vocab_size": 10**9}, "give it (1000000000,)"),
        ({"num_labels": 10**6}, "num_labels is 1000000"),  # transformers gives each of them a name
        ({"hidden_act": "\x1b[31m"}, "hidden_act is '\\x1b[31m'"),
    ],
)
def test_config_that_claims_nonsense_is_refused(folder: Path, changes: dict[str, Any], words: str):
    change_json(folder / "config.json", **changes)
    assert_refused(folder, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff", "not JSON"), (b'{"vocab_size": 16, "vocab_size": 17}', "'vocab_size' is there twice")],
)
def test_config_that_is_none_is_refused(folder: Path, content: bytes, words: str):
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, "config.json", words)


def test_giant_config_is_not_read(folder: Path):
    os.truncate(folder / "config.json", 2**40)  # a hole; it takes no space
    assert_refused(folder, "1,099,511,627,776 bytes are more than")


@pytest.mark.parametrize("words", [WORDS[:-1], [*WORDS, "l"]], ids=["smaller", "larger"])
def test_tokenizer_of_another_size_is_refused_with_both_numbers(folder: Path, words: list[str]):
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    load_tokenizer(folder / "vocab.txt").save_tokenizer_files(folder, model_max_length=32)
    assert_refused(folder, f"the tokenizer has {len(words)} ids and the embedding {len(WORDS)} rows")
