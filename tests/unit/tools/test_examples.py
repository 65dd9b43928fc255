"""The Python scripts of examples/; folders replace the Hub's repositories."""

import json
import runpy
import sys

import datasets
import pyarrow
import pyarrow.parquet
from commands import REPOSITORY, run_program
from json_files import write_jsonl
from unit.evaluation.embedding_inputs import RECIPE, read_config, write_card

# --- prepare_contrastive.py


SCRIPT = REPOSITORY / "examples" / "prepare_contrastive.py"
TRIPLET = {"anchor": "q", "positive": "p"}
# Dataset -> a row of each of its sources, with the columns of the Hub: query "q", positive "p", hard negatives "n".
ROWS = {
    "AGNEWS": [{"title": "q", "description": "p"}],
    "ALLNLI": [TRIPLET | {"negative": "n"}],
    "AMAZONQA": [{"query": "q", "pos": ["p", "x"]}],
    "CONCURRENTQA": [{"question": "q", "pos_paras": [{"text": "p"}, {"text": "x"}], "neg_paras": [{"text": "n"}]}],
    "GITHUBISSUE": [TRIPLET],
    "GOOAQ": [{"question": "q", "answer": "p", "negative_1": "n", "negative_2": "n"}],
    "MEDMCQA": [{"question": "q", "exp": "p"}],
    "NPR": [{"title": "q", "body": "p"}],
    "PAQ": [{"set": ["q", "p"]}],
    "PUBMEDQA": [TRIPLET | {"negative_1": "n", "negative_2": "n"}],
    "QQP": [{"set": {"query": "q", "pos": ["p", "x"], "neg": ["n", "n"]}}],
    "SENTENCECOMP": [{"set": ["p", "q"]}],
    "STACKEXCHANGE": [{"body1": "q", "body2": "p"}, {"post1": "q", "post2": "p"}],
    "STACKOVERFLOW": [{"query": "q", "positive": ["p"], "negative": ["n"]}],
    "STS12": [{"sentence1": "q", "sentence2": "p", "score": 4.1}],
    "STSBENCHMARK": [{"sentence1": "q", "sentence2": "p", "score": 4.1}],
    "TRIVIAQA": [TRIPLET | {"negative": "n"}],
    "WIKIHOW": [{"text": "q", "summary": "p"}],
}
# Repository -> its rows by config. Texts "x" must not be in a pair.
HUB = {
    "embedding-data/Amazon-QA": {"default": [{"query": "x", "pos": []}, *ROWS["AMAZONQA"]]},
    "mteb/sts12-sts": {"default": [{"sentence1": "x", "sentence2": "x", "score": 4.0}, *ROWS["STS12"]]},
    "sentence-transformers/stackexchange-duplicates": {
        "body-body-pair": ROWS["STACKEXCHANGE"][:1],
        "title-title-pair": [{"title1": "x", "title2": "x"}],
        "post-post-pair": ROWS["STACKEXCHANGE"][1:],
    },
    "sentence-transformers/npr": {"default": [{"headline": "q", "body": "p"}]},
    "mteb/fever": {
        "default": [
            {"query-id": "1", "corpus-id": "9", "score": 1},
            {"query-id": "2", "corpus-id": "8", "score": 0},
            {"query-id": "2", "corpus-id": "7", "score": 1},
        ],
        "queries": [{"_id": "1", "text": "q"}, {"_id": "2", "text": "x"}],
        "corpus": [{"_id": "8", "title": "t", "text": "x"}, {"_id": "9", "title": "t", "text": "p"}],
    },
}


def test_rows_of_all_datasets_of_the_recipe_become_pairs():
    program = runpy.run_path(str(SCRIPT))
    assert ROWS.keys() | program["JUDGED"] == read_config(RECIPE).datasets.keys()
    for key, rows in ROWS.items():
        for source, row in zip(program["SOURCES"][key], rows, strict=True):
            assert source.to_pair(row) == ("q", "p", ["n"] * str(row).count("'n'")), key


def test_pairs_are_written_existing_files_are_kept_and_a_failed_dataset_is_named(tmp_path):
    for name, configs in HUB.items():  # `load_dataset` prefers folders to the Hub
        for config, rows in configs.items():
            write_jsonl(tmp_path / name / f"{config}.jsonl", rows)
        splits = {"queries": "queries", "corpus": "corpus"}
        write_card(tmp_path / name, {config: {splits.get(config, "train"): config} for config in configs})
    output = tmp_path / "pairs"
    output.mkdir()
    (output / "AGNEWS.parquet").write_bytes(b"mine")
    keys = ("AGNEWS", "NPR", "AMAZONQA", "FEVER", "STACKEXCHANGE", "STS12")
    ended = run_program(sys.executable, SCRIPT, output, "--datasets", *keys, cwd=tmp_path)
    assert ended.returncode == 1 and "NPR: failed ('title')" in ended.stderr
    assert (output / "AGNEWS.parquet").read_bytes() == b"mine"
    written = {key: datasets.Dataset.from_parquet(str(output / f"{key}.parquet")).to_list() for key in keys[2:]}
    pair = {"query": "q", "positive": "p", "negatives": []}
    assert written == {"AMAZONQA": [pair], "FEVER": [pair], "STACKEXCHANGE": [pair, pair], "STS12": [pair]}
    assert {path.stem for path in output.iterdir()} == {*keys} - {"NPR"}


# --- word_order.py: a classification task without labels


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
