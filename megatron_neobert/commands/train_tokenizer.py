"""Train a WordPiece vocabulary on raw input files.

    neobert train-tokenizer --input 'texts/*.parquet' --output my-tokenizer --vocab-size 30522

writes a folder for `neobert preprocess --tokenizer-model` and Hugging Face's AutoTokenizer. The same input files in the
same order give the same vocabulary.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.cli import option
from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.text import counted

if TYPE_CHECKING:
    from megatron_neobert.data.inputs.records import ReadSettings

# Tokens of the first training stage. The conversion of a model writes the length of the model.
MODEL_MAX_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerOptions:
    input: tuple[str, ...] = option(help="input files: paths, globs, folders, URLs, @lists", metavar="PATH")
    output: Path = option(help="folder for the tokenizer's files", metavar="DIR")
    text_key: str = option("content", "column or JSON key of the text")
    vocab_size: int = option(30522, "largest number of ids", minimum=1)
    min_frequency: int = option(2, "do not merge pairs of pieces that are rarer", minimum=1)
    max_error_rate: float = option(
        0.001,
        "end with an error if more than this fraction of the records has no usable text, as in preprocessing",
        metavar="FRACTION",
    )
    lowercase: bool = option(
        True, "remove case and accents, as bert-base-uncased does (default); --no-lowercase keeps them"
    )


def train_tokenizer(options: TrainTokenizerOptions) -> None:
    """Train a WordPiece vocabulary on raw text files, for languages without a suitable published vocabulary.

    Write the tokenizer's files to the folder --output, and print a summary. Raise OutputError if the folder has such
    files already.
    """
    for name in ("vocab_size", "min_frequency"):
        if (number := getattr(options, name)) >= 2**31:
            raise ConfigError(f"--{name.replace('_', '-')} {number} is above {2**31 - 1}; use a smaller number")
    if not 0 <= options.max_error_rate <= 1:
        raise ConfigError(f"--max-error-rate {options.max_error_rate} is not a fraction of the records; use 0 to 1")
    for name in ("tokenizer.json", "vocab.txt"):
        if (file := options.output / name).exists():
            raise OutputError(f"{file} exists already; choose another --output, or remove the file")
    from megatron_neobert.data.corpus.format import describe_reasons
    from megatron_neobert.data.inputs.find import find_inputs
    from megatron_neobert.data.inputs.records import ReadSettings
    from megatron_neobert.data.tokenizer.tokenizer import train_wordpiece

    read = ReadSettings(text_key=options.text_key)
    texts = InputTexts(find_inputs(options.input), read, max_error_rate=options.max_error_rate)
    tokenizer = train_wordpiece(
        texts,
        vocab_size=options.vocab_size,
        lowercase=options.lowercase,
        min_frequency=options.min_frequency,
    )
    tokenizer.save_tokenizer_files(options.output, model_max_length=MODEL_MAX_LENGTH)
    left_out = describe_reasons(texts.counts.rejected | texts.counts.dropped)
    print(
        f"wrote {options.output}: {tokenizer.vocab_size:,} ids, {'lower case' if options.lowercase else 'with case'}, "
        f"from {texts.counts.documents:,} documents; records left out: {left_out}"
    )


class InputTexts:
    """Texts of all input files. Can be iterated over several times; `counts` is the result of the latest iteration."""

    def __init__(self, inputs: list[str], settings: "ReadSettings", *, max_error_rate: float) -> None:
        self._inputs, self._settings, self._max_error_rate = inputs, settings, max_error_rate

    def __iter__(self) -> Iterator[str]:
        """Yield the texts. Raise DataError at the end if too many records are in error, or there is no document."""
        from megatron_neobert.data.corpus.format import Counts, describe_reasons
        from megatron_neobert.data.inputs.find import input_version
        from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
        from megatron_neobert.data.preprocessing.run import check_error_rate
        from megatron_neobert.runtime.jobs import progress_bar

        self.counts = counts = Counts()
        first_error = None
        sizes = {path: input_version(path).bytes for path in self._inputs}
        with progress_bar(desc="input files", total=sum(sizes.values()), unit="B") as bar:
            for path, size in sizes.items():
                chunks = split_into_chunks(path, self._settings)
                for chunk in chunks:
                    before = bar.n
                    for batch in read_chunk(chunk, self._settings):
                        rejected: Counter[str] = Counter(record.reason for record in batch.rejected)
                        counts.add(Counts(len(batch.texts), rejected=rejected, dropped=batch.dropped))
                        if first_error is None and batch.rejected:
                            first_error = batch.rejected[0].describe(chunk, path)
                        yield from batch.texts
                        bar.update(before + int(batch.progress * size / len(chunks)) - bar.n)
        check_error_rate(counts, self._max_error_rate, first_error)
        if not counts.documents:
            files, reasons = counted(len(self._inputs), "input file"), describe_reasons(counts.dropped)
            raise DataError(f"no document in {files} ({reasons}); check --input")
