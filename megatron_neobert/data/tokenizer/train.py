"""Learns a WordPiece vocabulary from raw shards, for languages that no published vocabulary serves.

    neobert train-tokenizer --input 'shards/*.parquet' --output my-tokenizer --vocab-size 30522

writes a folder that neobert preprocess takes as --tokenizer-model and Hugging Face's AutoTokenizer loads. The
same shards in the same order give the same vocabulary.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.cli import option
from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.text import counted

if TYPE_CHECKING:  # a missing package is reported by run_command
    from megatron_neobert.data.inputs.records import ReadSettings

MODEL_MAX_LENGTH = 1024  # tokens; the first training stage's. Converting a model writes its own length


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerOptions:
    """The command line of `neobert train-tokenizer`."""

    input: tuple[str, ...] = option(help="input files: paths, globs, folders, URLs, @lists", metavar="PATH")
    output: Path = option(help="folder for the tokenizer's files", metavar="DIR")
    text_key: str = option("content", "column or JSON key of the text")
    vocab_size: int = option(30522, "upper bound of the number of ids", minimum=1)
    min_frequency: int = option(2, "rarer pairs of pieces stay apart", minimum=1)
    lowercase: bool = option(
        True, "ignore case and accents, as bert-base-uncased does (default); --no-lowercase keeps them"
    )


def train_tokenizer(options: TrainTokenizerOptions) -> None:
    """Learn a WordPiece vocabulary from raw text files, for languages that no published vocabulary serves.

    Raises:
        ConfigError: A number is out of its range.
        DataError: There is no document.
        OutputError: The folder has a tokenizer already.
    """
    for name in ("vocab_size", "min_frequency"):
        if (number := getattr(options, name)) >= 2**31:
            raise ConfigError(f"--{name.replace('_', '-')} {number} is not a number from 1 to {2**31 - 1}; change it")
    folder = options.output
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).exists():
            raise OutputError(f"{folder / name} exists already; choose another --output, or remove it")
    from megatron_neobert.data.corpus.format import describe_reasons
    from megatron_neobert.data.inputs.find import find_inputs
    from megatron_neobert.data.inputs.records import ReadSettings
    from megatron_neobert.data.tokenizer.tokenizer import train_wordpiece

    texts = ShardTexts(find_inputs(options.input), ReadSettings(text_key=options.text_key))
    tokenizer = train_wordpiece(
        texts,
        vocab_size=options.vocab_size,
        lowercase=options.lowercase,
        min_frequency=options.min_frequency,
    )
    tokenizer.save_tokenizer_files(folder, model_max_length=MODEL_MAX_LENGTH)
    left_out = describe_reasons(texts.left_out)
    print(f"{texts.documents:,} documents | {tokenizer.vocab_size:,} ids | left out: {left_out} | wrote {folder}")


class ShardTexts:
    """The texts of all shards, as often as they are iterated over; the counts are those of the latest time."""

    def __init__(self, shards: list[str], settings: "ReadSettings") -> None:
        self._shards, self._settings = shards, settings

    def __iter__(self) -> Iterator[str]:
        """Yield the texts. Raise DataError at the end if there was none."""
        from tqdm import tqdm

        from megatron_neobert.data.corpus.format import describe_reasons
        from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks

        self.documents, self.left_out = 0, Counter[str]()
        for shard in tqdm(self._shards, "shards", unit="shard", leave=False, disable=None):  # on a terminal
            for part in split_into_chunks(shard, self._settings):
                for batch in read_chunk(part, self._settings):
                    self.documents += len(batch.texts)
                    self.left_out.update(record.reason for record in batch.rejected)
                    self.left_out.update(batch.dropped)
                    yield from batch.texts
        if not self.documents:
            shards, reasons = counted(len(self._shards), "shard"), describe_reasons(self.left_out)
            raise DataError(f"no document in {shards} ({reasons}); check --input and --text-key")
