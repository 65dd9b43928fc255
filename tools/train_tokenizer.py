"""Learns a WordPiece vocabulary from raw shards, for languages that no published vocabulary serves.

    python tools/train_tokenizer.py --input 'shards/*.parquet' --output my-tokenizer --vocab-size 30522

writes a folder that tools/preprocess_data.py takes as --tokenizer-model and Hugging Face's AutoTokenizer loads. The
same shards in the same order give the same vocabulary.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_neobert.data.shards.find import find_shards
from megatron_neobert.data.shards.parts import read_part, split_into_parts
from megatron_neobert.data.shards.records import ReadSettings
from megatron_neobert.data.tokenizer import train_wordpiece
from megatron_neobert.errors import ConfigError, DataError, OutputError, run_command

MODEL_MAX_LENGTH = 1024  # tokens; the first training stage's. Converting a model writes its own length


def main() -> None:
    arguments = parse_arguments()
    for name in ("vocab_size", "min_frequency"):
        number = getattr(arguments, name)
        if not 1 <= number < 2**31:
            raise ConfigError(f"--{name.replace('_', '-')} {number} is not a number from 1 to {2**31 - 1}; change it")
    folder = Path(arguments.output)
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).exists():
            raise OutputError(f"{folder / name} exists already; choose another --output, or remove it")
    texts = ShardTexts(find_shards(arguments.input), ReadSettings(text_key=arguments.text_key))
    tokenizer = train_wordpiece(
        texts,
        vocab_size=arguments.vocab_size,
        lowercase=arguments.lowercase,
        min_frequency=arguments.min_frequency,
    )
    tokenizer.save_tokenizer_files(folder, model_max_length=MODEL_MAX_LENGTH)
    print(f"{texts.documents:,} documents | {tokenizer.vocab_size:,} ids | rejected: {texts.rejected} | wrote {folder}")


class ShardTexts:
    """The texts of all shards, as often as they are iterated over; counts those of the latest time."""

    def __init__(self, shards: list[str], settings: ReadSettings) -> None:
        self.documents = 0
        self._shards, self._settings = shards, settings
        self._reasons: Counter[str] = Counter()

    def __iter__(self) -> Iterator[str]:
        self.documents = 0
        self._reasons.clear()
        for shard in self._shards:
            for part in split_into_parts(shard, self._settings):
                for batch in read_part(part, self._settings):
                    self.documents += len(batch.texts)
                    self._reasons.update(record.reason for record in batch.rejected)
                    self._reasons.update(batch.dropped)
                    yield from batch.texts
        if not self.documents:
            raise DataError(
                f"no document in {len(self._shards)} shards (rejected: {self.rejected}); check --input and --text-key"
            )

    @property
    def rejected(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self._reasons.most_common()) or "none"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn a WordPiece vocabulary from raw shards.", allow_abbrev=False)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="shards: files, globs, folders, URLs, @lists"
    )
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
