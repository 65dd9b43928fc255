"""Write a classification task on the order of words, which needs no labels:

    python examples/word_order.py TEXTS.parquet word_order/swaps
    neobert evaluate classify --model MODEL --data-dir word_order --output results

Half of the sentences have two neighbouring words swapped. A model that counts words gets 50 %.
"""

import argparse
import itertools
import json
import random
import re
from pathlib import Path

import pyarrow.parquet

SPLITS = {"train": 7000, "validation": 1000, "test": 1000}


def read_sentences(path: Path, column: str) -> list[str]:
    """Return the different sentences of 8 to 40 words, without line breaks."""
    sentences: dict[str, None] = {}
    for text in pyarrow.parquet.read_table(path, columns=[column])[column].to_pylist():
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(text.split())):
            # Letters and commas alone: a misplaced bracket or quotation mark would show the swap.
            if 8 <= sentence.count(" ") + 1 <= 40 and re.fullmatch(r"[A-Z][A-Za-z,' -]*[.!?]", sentence):
                sentences[sentence] = None
    return list(sentences)


def swap_neighbours(sentence: str, generator: random.Random) -> str:
    """Swap two neighbouring words that differ, neither the first nor the last, and no word before a comma."""
    words = sentence.split()
    places = [i for i in range(1, len(words) - 2) if (words[i] + words[i + 1]).isalpha() and words[i] != words[i + 1]]
    if places:
        i = generator.choice(places)
        words[i : i + 2] = words[i + 1], words[i]
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="Parquet file")
    parser.add_argument("output", type=Path, help="new folder for train.jsonl, validation.jsonl and test.jsonl")
    parser.add_argument("--column", default="content", help="column of the texts (default: content)")
    options = parser.parse_args()
    sentences = read_sentences(options.texts, options.column)
    generator = random.Random(0)
    generator.shuffle(sentences)
    rows: list[dict[str, str]] = []
    for sentence in sentences:
        swapped = swap_neighbours(sentence, generator)
        if swapped != sentence:
            rows.append(
                {"text": sentence, "label": "original"} if len(rows) % 2 else {"text": swapped, "label": "swapped"}
            )
    if len(rows) < sum(SPLITS.values()):
        parser.error(f"{options.texts} has {len(rows):,} suitable sentences; the task needs {sum(SPLITS.values()):,}")
    options.output.mkdir(parents=True)
    lines = iter([json.dumps(row) + "\n" for row in rows])
    for split, size in SPLITS.items():
        text = "".join(itertools.islice(lines, size))
        (options.output / f"{split}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
