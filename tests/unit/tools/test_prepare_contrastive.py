"""`examples/prepare_contrastive.py` with folders in place of the repositories of the Hub."""

import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from commands import REPOSITORY, run_program
from json_files import write_jsonl
from unit.evaluation.contrastive_inputs import RECIPE, read_config, write_card

# Repository -> its rows by config, with the columns of the Hub. "q" is a query, "p" its positive, "n" a hard negative.
REPOSITORIES = {
    "sentence-transformers/agnews": {"default": [{"title": "q", "description": "p"}]},
    "sentence-transformers/all-nli": {"triplet": [{"anchor": "q", "positive": "p", "negative": "n"}]},
    "embedding-data/Amazon-QA": {"default": [{"query": "q", "pos": ["p", "x"]}, {"query": "x", "pos": []}]},
    "stanfordnlp/concurrentqa-retrieval": {
        "default": [{"question": "q", "pos_paras": [{"text": "p"}, {"text": "x"}], "neg_paras": [{"text": "n"}]}]
    },
    "WhereIsAI/github-issue-similarity": {"positive": [{"anchor": "q", "positive": "p"}]},
    "tomaarsen/gooaq-hard-negatives": {
        "triplet-5": [{"question": "q", "answer": "p", **{f"negative_{number}": "n" for number in range(1, 6)}}]
    },
    "openlifescienceai/medmcqa": {"default": [{"question": "q", "exp": "p"}, {"question": "x", "exp": None}]},
    "sentence-transformers/npr": {"default": [{"title": "q", "body": "p"}]},
    "embedding-data/PAQ_pairs": {"default": [{"set": ["q", "p"]}]},
    "sentence-transformers/pubmedqa": {
        "triplet-20": [{"anchor": "q", "positive": "p", **{f"negative_{number}": "n" for number in range(1, 21)}}]
    },
    "embedding-data/QQP_triplets": {"default": [{"set": {"query": "q", "pos": ["p", "x"], "neg": ["n", "n"]}}]},
    "embedding-data/sentence-compression": {"default": [{"set": ["p", "q"]}]},
    "sentence-transformers/stackexchange-duplicates": {
        "body-body-pair": [{"body1": "q", "body2": "p"}],
        "title-title-pair": [{"title1": "x", "title2": "x"}],
        "post-post-pair": [{"post1": "q", "post2": "p"}],
    },
    "mteb/stackoverflowdupquestions-reranking": {"default": [{"query": "q", "positive": ["p"], "negative": ["n"]}]},
    **{
        name: {"default": [{"sentence1": "q", "sentence2": "p", "score": score} for score in (4.0, 4.1)]}
        for name in ("mteb/sts12-sts", "mteb/stsbenchmark-sts")
    },
    "sentence-transformers/trivia-qa-triplet": {"triplet": [{"anchor": "q", "positive": "p", "negative": "n"}]},
    "sentence-transformers/wikihow": {"default": [{"text": "q", "summary": "p"}]},
}
JUDGED = {
    "default": [
        {"query-id": "1", "corpus-id": "9", "score": 1},
        {"query-id": "2", "corpus-id": "8", "score": 0},
        {"query-id": "2", "corpus-id": "7", "score": 1},
    ],
    "queries": [{"_id": "1", "text": "q"}, {"_id": "2", "text": "x"}],
    "corpus": [{"_id": "8", "title": "t", "text": "x"}, {"_id": "9", "title": "t", "text": "p"}],
}
NEGATIVES = {"ALLNLI": 1, "CONCURRENTQA": 1, "GOOAQ": 5, "PUBMEDQA": 20, "QQP": 2, "STACKOVERFLOW": 1, "TRIVIAQA": 1}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Return a folder with a folder for each repository, which `load_dataset` prefers to the Hub."""
    folder = tmp_path_factory.mktemp("hub")
    for name, configs in [*REPOSITORIES.items(), *((name, JUDGED) for name in ("mteb/fever", "mteb/msmarco"))]:
        for config, rows in configs.items():
            write_jsonl(folder / name / f"{config}.jsonl", rows)
        splits = {"queries": "queries", "corpus": "corpus"}
        write_card(folder / name, {config: {splits.get(config, "train"): config} for config in configs})
    return folder


def prepare(hub: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return run_program(sys.executable, REPOSITORY / "examples" / "prepare_contrastive.py", *words, cwd=hub)


def test_files_of_all_datasets_of_the_recipe_have_the_pairs_of_their_repositories(hub, tmp_path):
    ended = prepare(hub, tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "") or "failed" not in ended.stderr, ended.stderr
    found = {path.stem: datasets.Dataset.from_parquet(str(path)).to_list() for path in tmp_path.iterdir()}
    expected = {
        key: [{"query": "q", "positive": "p", "negatives": ["n"] * NEGATIVES.get(key, 0)}]
        for key in read_config(RECIPE).datasets
    }
    expected["STACKEXCHANGE"] *= 2
    assert found == expected


def test_failed_dataset_is_named_and_the_next_one_and_existing_files_are_kept(hub, tmp_path):
    (tmp_path / "AGNEWS.parquet").write_bytes(b"mine")
    (tmp_path / "hub").mkdir()
    write_jsonl(tmp_path / "hub" / "sentence-transformers" / "npr" / "train.jsonl", [{"headline": "q", "body": "p"}])
    (tmp_path / "hub" / "mteb").symlink_to(hub / "mteb")
    ended = prepare(tmp_path / "hub", tmp_path, "--datasets", "AGNEWS", "NPR", "FEVER")
    assert ended.returncode == 1
    assert "NPR: failed ('title')" in ended.stderr
    assert {path.name for path in tmp_path.glob("*.parquet")} == {"AGNEWS.parquet", "FEVER.parquet"}
    assert (tmp_path / "AGNEWS.parquet").read_bytes() == b"mine"
