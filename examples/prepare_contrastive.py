"""Download the pairs of NeoBERT's contrastive fine-tuning from the Hugging Face Hub, on a machine with a network.

    python examples/prepare_contrastive.py pairs                       # all datasets of the recipe
    python examples/prepare_contrastive.py pairs --datasets ALLNLI QQP
    neobert train-embedder --model MODEL --data-dir pairs --config evaluation/contrastive --output results

It writes pairs/KEY.parquet with the columns query, positive and negatives, and keeps files that exist. It needs the
package datasets only.

Source: the paper (arXiv 2502.19587, table 7) names the datasets, and its released code (chandar-lab/NeoBERT,
contrastive/) has repositories and columns. AGNEWS, NPR and MEDMCQA are not in the code; their repositories are choices
of this project. The paper does not say how the pairs of its datasets MEDMCQACLUST and YAHOOCLUST were made.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets

Row = dict[str, Any]
Pair = tuple[str | None, str | None, list[str]]  # query, positive and hard negatives

TEXT = datasets.Value("string")
FEATURES = datasets.Features({"query": TEXT, "positive": TEXT, "negatives": datasets.Sequence(TEXT)})


class Source(NamedTuple):
    """Rows of a repository on the Hub, and the function that makes a pair of a row."""

    hub: str
    to_pair: Callable[[Row], Pair]
    config: str | None = None


def columns(query: str, positive: str) -> Callable[[Row], Pair]:
    """Return a function that makes a pair of two columns of a row. Columns named negative... are hard negatives."""
    return lambda row: (row[query], row[positive], [row[name] for name in row if name.startswith("negative")])


def first(texts: list[str]) -> str | None:
    return texts[0] if texts else None


def of_concurrent_qa(row: Row) -> Pair:
    positives, negatives = ([text["text"] for text in row[name]] for name in ("pos_paras", "neg_paras"))
    return row["question"], first(positives), negatives


def similar(row: Row) -> Pair:
    """Return two sentences as a pair if people gave them a similarity above 4 of 5."""
    return (row["sentence1"], row["sentence2"], []) if row["score"] > 4 else (None, None, [])


SOURCES = {
    "AGNEWS": [Source("sentence-transformers/agnews", columns("title", "description"))],
    "ALLNLI": [Source("sentence-transformers/all-nli", columns("anchor", "positive"), "triplet")],
    "AMAZONQA": [Source("embedding-data/Amazon-QA", lambda row: (row["query"], first(row["pos"]), []))],
    "CONCURRENTQA": [Source("stanfordnlp/concurrentqa-retrieval", of_concurrent_qa)],
    "GITHUBISSUE": [Source("WhereIsAI/github-issue-similarity", columns("anchor", "positive"), "positive")],
    "GOOAQ": [Source("tomaarsen/gooaq-hard-negatives", columns("question", "answer"), "triplet-5")],
    "MEDMCQA": [Source("openlifescienceai/medmcqa", columns("question", "exp"))],
    "NPR": [Source("sentence-transformers/npr", columns("title", "body"))],
    "PAQ": [Source("embedding-data/PAQ_pairs", lambda row: (row["set"][0], row["set"][1], []))],
    "PUBMEDQA": [Source("sentence-transformers/pubmedqa", columns("anchor", "positive"), "triplet-20")],
    "QQP": [
        Source(
            "embedding-data/QQP_triplets",
            lambda row: (row["set"]["query"], first(row["set"]["pos"]), row["set"]["neg"]),
        )
    ],
    # As in the code: the short text asks for the long one, although the instruction says the opposite.
    "SENTENCECOMP": [Source("embedding-data/sentence-compression", lambda row: (row["set"][1], row["set"][0], []))],
    "STACKEXCHANGE": [
        Source("sentence-transformers/stackexchange-duplicates", columns("body1", "body2"), "body-body-pair"),
        Source("sentence-transformers/stackexchange-duplicates", columns("post1", "post2"), "post-post-pair"),
    ],
    "STACKOVERFLOW": [
        Source(
            "mteb/stackoverflowdupquestions-reranking",
            lambda row: (row["query"], first(row["positive"]), row["negative"]),
        )
    ],
    "STS12": [Source("mteb/sts12-sts", similar)],
    "STSBENCHMARK": [Source("mteb/stsbenchmark-sts", similar)],
    "TRIVIAQA": [Source("sentence-transformers/trivia-qa-triplet", columns("anchor", "positive"), "triplet")],
    "WIKIHOW": [Source("sentence-transformers/wikihow", columns("text", "summary"))],
}
# Repositories in the format of BEIR: queries, documents and relevance judgements.
JUDGED = {"FEVER": "mteb/fever", "MSMARCO": "mteb/msmarco"}


def load(hub: str, config: str | None, split: str = "train") -> Any:
    return datasets.load_dataset(hub, config, split=split, streaming=True)


def judged_pairs(hub: str) -> Iterator[Pair]:
    """Yield a pair for each judgement above 0. Documents have no titles, as in the released code."""
    # Reading the judgements first keeps only relevant documents in memory: a corpus has millions of texts.
    rows = load(hub, "default")
    judged = [(str(row["query-id"]), str(row["corpus-id"])) for row in rows if row["score"] > 0]
    relevant = {document for _, document in judged}
    queries = {str(row["_id"]): row["text"] for row in load(hub, "queries", "queries")}
    documents = load(hub, "corpus", "corpus")
    corpus = {str(row["_id"]): row["text"] for row in documents if str(row["_id"]) in relevant}
    return ((queries.get(query), corpus.get(document), []) for query, document in judged)


def read_pairs(key: str) -> Iterator[dict[str, Any]]:
    """Yield the pairs of a dataset that have a query and a positive."""
    parts = [map(source.to_pair, load(source.hub, source.config)) for source in SOURCES.get(key, ())]
    for query, positive, negatives in itertools.chain(*parts, judged_pairs(JUDGED[key]) if key in JUDGED else ()):
        if query and positive:
            yield {"query": query, "positive": positive, "negatives": [text for text in negatives if text]}


def main() -> int:
    """Write the files of all datasets, and return 1 if one of them cannot be downloaded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write to")
    keys = sorted([*SOURCES, *JUDGED])
    parser.add_argument("--datasets", nargs="+", default=keys, choices=keys, metavar="KEY")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for key in options.datasets:
        target = options.folder / f"{key}.parquet"
        if target.exists():
            print(f"{key}: kept {target}", flush=True)
            continue
        try:
            with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
                pairs = datasets.Dataset.from_generator(
                    read_pairs, features=FEATURES, gen_kwargs={"key": key}, cache_dir=scratch
                )
                written = Path(scratch) / target.name
                pairs.to_parquet(written)
                written.replace(target)
            print(f"{key}: wrote {target}, {len(pairs):,} pairs", flush=True)
        except Exception as error:  # several libraries raise errors of their own
            print(f"{key}: failed ({error.__cause__ or error})", file=sys.stderr, flush=True)
            failed.append(key)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
