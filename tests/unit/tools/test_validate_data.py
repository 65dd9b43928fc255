"""The command that checks a corpus."""

import pytest
from commands import run_forked
from unit.data.small_corpus import numbered_tokenizer, write_corpus


@pytest.fixture
def prefix(tmp_path):
    """Three documents of 3, 2 and 3 tokens as uint16, in two corpus shards."""
    write_corpus(tmp_path / "P", [[5, 6, 7], [8, 9], [10, 11, 12]], numbered_tokenizer(100), shard_bytes=10)
    return tmp_path / "P"


def test_exchanged_tokens_are_found_by_the_full_check_alone(prefix):
    prefix.with_name("P_00001.bin").write_bytes(bytes([11, 0, 10, 0, 12, 0]))
    assert run_forked("validate", prefix).code == 0
    code, output = run_forked("validate", prefix, "--full")
    assert code == 65
    assert "P_00001.bin, byte 0: expected sha256 " in output
