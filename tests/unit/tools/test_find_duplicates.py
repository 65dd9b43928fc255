"""`neobert find-duplicates` as a user calls it."""

import pytest
from commands import run_forked
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus


@pytest.fixture
def prefix(tmp_path):
    """Write a corpus of three documents; the third equals the first."""
    documents = random_documents([30, 70], 1000)
    write_corpus(tmp_path / "P", [*documents, documents[0]], numbered_tokenizer(1000))
    return tmp_path / "P"


def test_summary_has_the_dropped_documents_and_their_share(prefix, tmp_path):
    code, output = run_forked("find-duplicates", prefix, "--output", tmp_path / "list")
    assert code == 0
    assert f"{prefix}: 1 of 3 documents dropped (33.33 %)" in output
    assert f"wrote {tmp_path / 'list'}" in output


def test_wrong_threshold_is_refused_in_one_sentence(prefix, tmp_path):
    ended = run_forked("find-duplicates", prefix, "--threshold", "1.5", "--output", tmp_path / "list")
    assert ended.refused(2) and "--threshold 1.5 is not above 0 and at most 1" in ended.output
    assert not list(tmp_path.glob("list*"))
