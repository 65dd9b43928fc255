"""`examples/word_order.py`: a classification task without labels."""

import json
import sys

import pyarrow
import pyarrow.parquet
from commands import REPOSITORY, run_program

WORDS = [left + right for left in ("ba", "do", "ki", "lu") for right in ("n", "r", "t", "st", "mp")]


def write_task(tmp_path, sentences):
    texts = []
    for i in range(sentences):
        number = "".join("abcdefghij"[int(digit)] for digit in str(i))
        texts.append(f"The {' '.join(WORDS[(i * k) % len(WORDS)] for k in range(1, 12))} number {number}.")
    pyarrow.parquet.write_table(pyarrow.table({"content": texts}), tmp_path / "texts.parquet")
    script = REPOSITORY / "examples" / "word_order.py"
    return texts, run_program(sys.executable, script, "texts.parquet", "order/swaps", cwd=tmp_path)


def test_half_of_the_sentences_have_two_neighbours_swapped_and_no_sentence_is_used_twice(tmp_path):
    texts, ended = write_task(tmp_path, sentences=9_100)
    assert ended.returncode == 0, ended.stderr
    originals = {" ".join(sorted(text.split())): text.split() for text in texts}
    seen = set()
    for split, size in {"train": 7000, "validation": 1000, "test": 1000}.items():
        lines = (tmp_path / "order" / "swaps" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["label"] for row in rows].count("swapped") == size / 2 == len(rows) / 2
        for row in rows:
            words = row["text"].split()
            original = originals[" ".join(sorted(words))]
            seen.add(tuple(original))
            moved = [i for i in range(len(words)) if words[i] != original[i]]
            assert len(moved) == (2 if row["label"] == "swapped" else 0)
            assert not moved or moved[1] == moved[0] + 1
    assert len(seen) == 9_000


def test_too_few_sentences_are_refused_with_their_number(tmp_path):
    _, ended = write_task(tmp_path, sentences=100)
    assert ended.returncode == 2 and "needs 9,000" in ended.stderr
    assert not (tmp_path / "order").exists()
