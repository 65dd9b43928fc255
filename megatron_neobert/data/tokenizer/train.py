"""Learns a WordPiece vocabulary from raw shards, for languages that no published vocabulary serves.

    neobert train-tokenizer --input 'shards/*.parquet' --output my-tokenizer --vocab-size 30522

writes a folder that neobert preprocess takes as --tokenizer-model and Hugging Face's AutoTokenizer loads. The
same shards in the same order give the same vocabulary.
"""

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
    max_error_rate: float = option(
        0.001,
        "share of the records that may be in error (malformed, no such key, null), as in preprocessing",
        metavar="FRACTION",
    )
    lowercase: bool = option(
        True, "ignore case and accents, as bert-base-uncased does (default); --no-lowercase keeps them"
    )


def train_tokenizer(options: TrainTokenizerOptions) -> None:
    """Learn a WordPiece vocabulary from raw text files, for languages that no published vocabulary serves.

    Raises:
        ConfigError: A number is out of its range.
        DataError: Too many records are in error, or there is no document.
        OutputError: The folder has a tokenizer already.
    """
    for name in ("vocab_size", "min_frequency"):
        if (number := getattr(options, name)) >= 2**31:
            raise ConfigError(f"--{name.replace('_', '-')} {number} is not a number from 1 to {2**31 - 1}; change it")
    if not 0 <= options.max_error_rate <= 1:
        raise ConfigError(f"--max-error-rate {options.max_error_rate} is not a fraction of the records; use 0 to 1")
    folder = options.output
    for name in ("tokenizer.json", "vocab.txt"):
        if (folder / name).exists():
            raise OutputError(f"{folder / name} exists already; choose another --output, or remove it")
    from megatron_neobert.data.corpus.format import describe_reasons
    from megatron_neobert.data.inputs.find import find_inputs
    from megatron_neobert.data.inputs.records import ReadSettings
    from megatron_neobert.data.tokenizer.tokenizer import train_wordpiece

    read = ReadSettings(text_key=options.text_key)
    texts = ShardTexts(find_inputs(options.input), read, max_error_rate=options.max_error_rate)
    tokenizer = train_wordpiece(
        texts,
        vocab_size=options.vocab_size,
        lowercase=options.lowercase,
        min_frequency=options.min_frequency,
    )
    tokenizer.save_tokenizer_files(folder, model_max_length=MODEL_MAX_LENGTH)
    left_out = describe_reasons(texts.counts.rejected + texts.counts.dropped)
    print(
        f"{texts.counts.documents:,} documents | {tokenizer.vocab_size:,} ids | left out: {left_out} | wrote {folder}"
    )


class ShardTexts:
    """The texts of all shards, as often as they are iterated over; `counts` are those of the latest time."""

    def __init__(self, shards: list[str], settings: "ReadSettings", *, max_error_rate: float) -> None:
        self._shards, self._settings, self._max_error_rate = shards, settings, max_error_rate

    def __iter__(self) -> Iterator[str]:
        """Yield the texts. Raise DataError at the end if too many records were in error, or there is no document."""
        from tqdm import tqdm

        from megatron_neobert.data.corpus.format import describe_reasons
        from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
        from megatron_neobert.data.preprocessing.chunks import Counts
        from megatron_neobert.data.preprocessing.run import check_error_rate

        self.counts = counts = Counts()
        first_error = None
        for shard in tqdm(self._shards, "shards", unit="shard", leave=False, disable=None):  # on a terminal
            for part in split_into_chunks(shard, self._settings):
                for batch in read_chunk(part, self._settings):
                    counts.documents += len(batch.texts)
                    counts.rejected.update(record.reason for record in batch.rejected)
                    counts.dropped.update(batch.dropped)
                    if first_error is None and batch.rejected:
                        first_error = batch.rejected[0].describe(part, shard)
                    yield from batch.texts
        check_error_rate(counts, self._max_error_rate, first_error, records=counts.records)
        if not counts.documents:
            shards, reasons = counted(len(self._shards), "shard"), describe_reasons(counts.dropped)
            raise DataError(f"no document in {shards} ({reasons}); check --input")
