"""Hostile tokenizers: code that a folder brings along is never imported, and no file is unpickled."""

import json
from pathlib import Path

import pytest
from hostile import Canary
from processes import run_command
from transformers import AutoTokenizer


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard.jsonl"
    path.write_text('{"content": "a few words"}\n')
    return path


def preprocess(shard: Path, tokenizer: Path, *more: str):
    return run_command(
        "tools.preprocess_data",
        *("--input", shard, "--output-prefix", shard.parent / "out"),
        *("--tokenizer-model", tokenizer, *more),
    )


def test_folder_with_its_own_code_is_refused(shard: Path, tmp_path: Path, canary: Canary):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (folder / "own_code.py").write_text(
        f"{canary.source}from transformers import BertTokenizer\nclass Own(BertTokenizer): pass\n"
    )
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own_code.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    result = preprocess(shard, folder)
    assert result.refused(65), result.output
    assert "auto_map asks for the tokenizer's own Python code, which is never run" in result.output
    assert not canary.has_run
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert canary.has_run
