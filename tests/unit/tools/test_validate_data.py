"""`neobert validate` as a user calls it."""

import pytest
from commands import run_forked
from unit.data.small_corpus import numbered_tokenizer, write_corpus


@pytest.fixture
def prefix(tmp_path):
    """Write a corpus of 3, 2 and 3 tokens as uint16, in two shards."""
    write_corpus(tmp_path / "P", [[5, 6, 7], [8, 9], [10, 11, 12]], numbered_tokenizer(100), shard_bytes=10)
    return tmp_path / "P"


@pytest.mark.parametrize(("more", "what"), [([], "index"), (["--full"], "all tokens read")])
def test_sound_corpus_of_several_shards_is_described(prefix, more, what):
    code, output = run_forked("validate", prefix, *more)
    assert code == 0
    assert output.startswith(f"{prefix} is sound ({what}): 3 documents, 8 tokens as uint16 in 2 volumes, 100 ids of ")


def test_exchanged_tokens_are_detected_only_with_full(prefix):
    prefix.with_name("P_00001.bin").write_bytes(bytes([11, 0, 10, 0, 12, 0]))
    assert run_forked("validate", prefix).code == 0
    code, output = run_forked("validate", prefix, "--full")
    assert code == 65
    assert "P_00001.bin, byte 0: expected sha256 " in output
