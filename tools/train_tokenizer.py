"""Learns a WordPiece vocabulary from raw shards, for languages that no published vocabulary serves.

    python tools/train_tokenizer.py --input 'shards/*.parquet' --output my-tokenizer --vocab-size 30522

writes a folder that tools/preprocess_data.py takes as --tokenizer-model and Hugging Face's AutoTokenizer loads. The
same shards in the same order give the same vocabulary.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_neobert.data.text_shards import Document, find_shards, read_part, split_into_parts
from megatron_neobert.data.tokenizer import train_wordpiece
from megatron_neobert.errors import DataError, OutputError, run_command

MODEL_MAX_LENGTH = 1024  # tokens; the first training stage's. Converting a model writes its own length


def main() -> None:
    arguments = parse_arguments()
    folder = Path(arguments.output)
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).exists():
            raise OutputError(f"{folder / name} exists already; choose another --output, or remove it")
    shards = find_shards(arguments.input)
    counts: Counter[str] = Counter()
    tokenizer = train_wordpiece(
        texts(shards, text_key=arguments.text_key, counts=counts),
        vocab_size=arguments.vocab_size,
        lowercase=arguments.lowercase,
        min_frequency=arguments.min_frequency,
    )
    documents = counts.pop("documents", 0)
    rejected = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common()) or "none"
    if not documents:
        raise DataError(f"no document in {len(shards)} shards (rejected: {rejected}); check --input and --text-key")
    tokenizer.save_tokenizer_files(folder, model_max_length=MODEL_MAX_LENGTH)
    print(f"{documents:,} documents | {tokenizer.vocab_size:,} ids | rejected: {rejected} | wrote {folder}")


def texts(shards: list[Path], *, text_key: str, counts: Counter[str]) -> Iterator[str]:
    """The texts of all shards; `counts` gets "documents", and the rejected records by reason."""
    for shard in shards:
        for part in split_into_parts(shard):
            for record in read_part(part, text_key=text_key):
                if isinstance(record, Document):
                    counts["documents"] += 1
                    yield record.text
                else:
                    counts[record.reason] += 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn a WordPiece vocabulary from raw shards.", allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="shards: files, globs, folders")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the tokenizer's files")
    parser.add_argument("--text-key", default="content", help="column or JSON key of the text (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=30522, help="upper bound of the number of ids (%(default)s)")
    parser.add_argument("--min-frequency", type=int, default=2, help="rarer pairs of pieces stay apart (%(default)s)")
    parser.add_argument(
        "--lowercase",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ignore case and accents, as bert-base-uncased does (default); --no-lowercase keeps them",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
