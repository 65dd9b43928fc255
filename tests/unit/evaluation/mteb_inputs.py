"""Inputs for tests of MTEB: a tiny encoder, files of local tasks, and a folder in place of the Hub."""

from pathlib import Path

from unit.evaluation.contrastive_inputs import write_bert, write_card, write_jsonl

WORDS = ["wing", "flow", "heat", "card", "money", "bank", "cell", "gene", "food", "health", "the", "of"]
DIGITS = [str(digit) for digit in range(10)] + [f"##{digit}" for digit in range(10)]


def make_encoder(folder: Path) -> Path:
    return write_bert(folder, [*WORDS, *DIGITS], positions=64)


def write_pairs(folder: Path) -> Path:
    """Write a local STS task, in which two sentences have a higher score the more words they share."""
    folder.mkdir(parents=True)
    lines = ["sentence1\tsentence2\tscore"]
    for shared in range(6):
        for start in range(3):
            first = [WORDS[(start + i) % 12] for i in range(5)]
            second = first[:shared] + [WORDS[(start + 5 + i) % 12] for i in range(5 - shared)]
            # A bare quote is part of the text.
            lines.append(f'{" ".join(first)}\t{" ".join(second)} "\t{shared}')
    (folder / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_beir(folder: Path) -> Path:
    """Write a local retrieval task of 12 documents and 4 queries, each query equal to its relevant document."""
    documents = [{"_id": f"d{i}", "title": "", "text": f"{word} {i}"} for i, word in enumerate(WORDS)]
    write_jsonl(folder / "corpus.jsonl", documents)
    write_jsonl(folder / "queries.jsonl", [{"_id": f"q{i}", "text": f"{WORDS[i]} {i}"} for i in range(4)])
    lines = ["query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in range(4))]
    (folder / "qrels.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_hub(folder: Path) -> Path:
    """Write folders with the names of two datasets of the Hub, which `load_dataset` prefers to the Hub."""
    rows = [{"sentence1": f"gene {i}", "sentence2": f"cell {i * i}", "score": float(i % 5)} for i in range(8)]
    write_jsonl(folder / "mteb/biosses-sts/test.jsonl", rows)
    retrieval = folder / "mteb/nfcorpus"
    write_jsonl(retrieval / "corpus.jsonl", [{"_id": f"d{i}", "title": f"{i}", "text": f"food {i}"} for i in range(9)])
    write_jsonl(retrieval / "queries.jsonl", [{"_id": f"q{i}", "text": f"food {i}"} for i in range(3)])
    write_jsonl(retrieval / "qrels.jsonl", [{"query-id": f"q{i}", "corpus-id": f"d{i}", "score": 1} for i in range(3)])
    splits = {"default": {"test": "qrels"}, "corpus": {"corpus": "corpus"}, "queries": {"queries": "queries"}}
    write_card(retrieval, splits)
    return folder
