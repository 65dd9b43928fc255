"""`neobert add-attributes`: calls a function with every document of a finished corpus, and keeps the values it returns.

    def score(record):
        return {"quality": classifier(record.text), "characters": len(record.text)}

The function gets a `Record` as filters do, with the existing attributes of the document as its fields. The text is
decoded from the token ids. One job per chunk of documents computes the new columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_neobert import __version__
from megatron_neobert.cli import option
from megatron_neobert.data.corpus.added_attributes import add_attributes, attributes_folder, is_added
from megatron_neobert.data.corpus.attribute_columns import Plain, join_columns, pack_columns
from megatron_neobert.data.corpus.attributes import read_attributes
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.preprocessing.filters import FilterSource, Record, find_filters, load_filter
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.runtime.jobs import Job, JobOptions, finish_jobs
from megatron_neobert.runtime.new_file import NewFile

# Documents of a job, which a kill makes a worker repeat. Functions may take milliseconds per document.
CHUNK_DOCUMENTS = 1 << 14


@dataclass(frozen=True, kw_only=True)
class AddSettings(JobOptions):
    """Options of `neobert add-attributes`."""

    prefix: str = option(help="path of a corpus without .bin", positional=True)
    function: str = option(
        help="function that returns a dict of new attributes for a record with text and fields. The text is decoded "
        "from token ids: lower-case for an uncased tokenizer, and with other white space",
        metavar="FILE.py:FUNCTION",
    )
    tokenizer_model: str = option(help="tokenizer with which the corpus was written", metavar="PATH")
    overwrite: bool = option(False, "discard the unfinished work of another run; attributes are never replaced")


@dataclass(frozen=True)
class AttributeJob(Job[None]):
    """Compute the new attributes of consecutive documents, and write them as `pack_columns` does."""

    result_type = None
    kinds = ("attributes",)

    prefix: str
    manifest_sha256: str
    tokenizer_model: str
    source: FilterSource
    attributes: tuple[str, ...]
    documents: range

    @property
    def key(self) -> str:
        return self.manifest_sha256

    def work(self, files: Mapping[str, NewFile]) -> None:
        corpus, tokenizer = _open(self.prefix, self.manifest_sha256, self.tokenizer_model)
        rows = compute_attributes(corpus, tokenizer, self.source, self.documents, self.attributes)
        files["attributes"].write(pack_columns({name: [row[name] for row in rows] for name in self.attributes}))


def print_added_attributes(options: AddSettings) -> None:
    """Add attributes to a finished corpus, computed by a function from the text of each document.

    Training chooses documents by them with --data-path PREFIX:where=EXPRESSION, and checkpoints stay valid. Raise
    ConfigError if the function cannot be imported or an attribute exists, DataError if the function fails or the
    corpus is damaged, MissingInputError if the corpus or the tokenizer is missing, and OutputError if unfinished work
    exists.
    """
    (source,) = find_filters([options.function], flag="--function")
    with attributes_folder(Corpus(options.prefix)) as folder:
        # Opened again, because another run may have added attributes before the folder was locked.
        corpus = Corpus(options.prefix)
        tokenizer = load_tokenizer(options.tokenizer_model)
        corpus.check_tokenizer(tokenizer)
        (first,) = compute_attributes(corpus, tokenizer, source, range(1), None)
        names = ", ".join(first)
        origin = f"{source.label} {source.sha256}: {names}"
        decisive = {"function": origin, "documents of a chunk": CHUNK_DOCUMENTS, "version": __version__}
        if not is_added(corpus, origin, first):
            folder.begin(decisive, resume=options.resume, overwrite=options.overwrite)
            manifest_sha256 = sha256_of(corpus.files.manifest)
            jobs = [
                AttributeJob(
                    folder.path,
                    f"documents-{begin}",
                    str(Path(options.prefix).absolute()),
                    manifest_sha256,
                    str(Path(options.tokenizer_model).absolute()),
                    source,
                    tuple(first),
                    range(begin, min(begin + CHUNK_DOCUMENTS, len(corpus))),
                )
                for begin in range(0, len(corpus), CHUNK_DOCUMENTS)
            ]
            for _ in finish_jobs(jobs, options, label="chunks"):
                pass
            chunks = [job.file("attributes") for job in jobs]
            add_attributes(corpus, folder, origin, lambda path: join_columns(path, chunks, None))
        # The folder may have unfinished work of another function.
        if folder.read_settings() == decisive:
            folder.remove()
    print(f"{options.prefix}: {len(corpus):,} documents have {names}")


def compute_attributes(
    corpus: Corpus, tokenizer: Tokenizer, source: FilterSource, documents: range, names: tuple[str, ...] | None
) -> list[dict[str, Plain]]:
    """Return the new attributes of each document of a range.

    Args:
        names: The attributes that every document must have; None allows any.

    Raises:
        DataError: The function failed, or did not return these attributes; or the corpus is damaged.
    """
    function = cast(Callable[[Record], Any], load_filter(source))
    numbers, start = np.arange(documents.start, documents.stop), np.zeros(1, np.int64)
    lengths = corpus.lengths_of(numbers).astype(np.int64)
    rows = []
    for index, fields in enumerate(read_attributes(corpus, documents)):
        number = numbers[index : index + 1]
        text = tokenizer.decode(corpus.gather(number, start, lengths[index : index + 1]))
        try:
            row = function(Record(text, fields["input"], fields))
            _check_row(row, names)
        except Exception as error:
            raise DataError(
                f"{source.label}, document {number[0]} of {corpus.prefix}: {type(error).__name__}: {error}; correct "
                "the function and start again with --overwrite"
            ) from error
        rows.append(row)
    return rows


def _check_row(row: Any, names: tuple[str, ...] | None) -> None:
    """Raise TypeError unless `row` is a dict of plain values with these names. None allows any, but at least one."""
    if not isinstance(row, dict):
        raise TypeError(f"returned {type(row).__name__} instead of a dict")
    for name, value in row.items():
        if not isinstance(name, str) or not isinstance(value, Plain):
            raise TypeError(f"returned {name!r} as {type(value).__name__} instead of bool, int, float, str or None")
    if not row:
        raise TypeError("returned no attribute")
    if names is not None and row.keys() != set(names):
        raise TypeError(
            f"returned the attributes {sorted(row)} instead of {sorted(names)}, those of document 0; a missing value "
            "must be None"
        )


@cache
def _open(prefix: str, manifest_sha256: str, tokenizer_model: str) -> tuple[Corpus, Tokenizer]:
    """Open corpus and tokenizer, once per process and version of the manifest."""
    return Corpus(prefix), load_tokenizer(tokenizer_model)
