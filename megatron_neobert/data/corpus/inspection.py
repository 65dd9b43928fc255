"""Commands that read a corpus: `neobert validate` checks it, `neobert inspect data` prints a summary or documents.

    neobert validate corpus/web_content_document --full
    neobert inspect data corpus/web_content_document
    neobert inspect data corpus/web_content_document --inputs
    neobert inspect data corpus/web_content_document --tokenizer-model vocab.txt --document 0 17 --tokens 50

Documents are printed as the tokenizer decodes their ids. White space differs from the original text; with an uncased
vocabulary, case and accents differ too. Characters that a terminal would act upon are printed as escapes.
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.cli import option
from megatron_neobert.errors import ConfigError
from megatron_neobert.text import visible

# Imports at run time are inside functions, so that `run_command` reports a missing package.
if TYPE_CHECKING:
    from megatron_neobert.data.corpus.reader import Corpus


@dataclass(frozen=True, kw_only=True)
class _CorpusOptions:
    prefix: str = option(help="path or URL without .bin, as in PREFIX_content_document", positional=True)
    object_storage_cache_path: str | None = option(None, "local folder for the cache of a remote corpus", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(_CorpusOptions):
    """Options of `neobert validate`."""

    full: bool = option(False, "also read every token and compare all checksums")


def validate(options: ValidateOptions) -> None:
    """Check a corpus, and print a summary if it is sound. Exit with code 65 and a message if it is damaged.

    Without --full, the command reads the manifest and the indexes (sizes, lengths, pointers), but no token ids.
    """
    from megatron_neobert.data.corpus.reader import check_content, check_indexes

    corpus = _open(options)
    (check_content if options.full else check_indexes)(corpus)
    manifest = corpus.manifest
    shards = f" in {len(corpus.shards):,} corpus shards" if len(corpus.shards) > 1 else ""
    print(
        f"{options.prefix} is sound{' (all tokens read)' if options.full else ' (index)'}: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens as {manifest.dtype}{shards}, "
        f"{manifest.vocab_size:,} ids of tokenizer {manifest.tokenizer_fingerprint[:12]}"
    )


@dataclass(frozen=True, kw_only=True)
class InspectDataOptions(_CorpusOptions):
    """Options of `neobert inspect data`."""

    document: tuple[int, ...] | None = option(None, "print these documents, counted from 0")
    inputs: bool = option(False, "list the input files, with the documents and tokens of each")
    tokens: int = option(200, "print at most N tokens of each document", minimum=1)
    tokenizer_model: str | None = option(None, "tokenizer with which the corpus was written", metavar="PATH")


def inspect_data(options: InspectDataOptions) -> None:
    """Print a summary of a corpus, its input files (--inputs), or documents (--document).

    Raises:
        ConfigError: A document does not exist, or --tokenizer-model or --object-storage-cache-path is missing.
    """
    corpus = _open(options)
    if options.inputs:
        print_inputs(corpus)
    elif not options.document:
        print_summary(corpus)
    if options.document:
        print_documents(corpus, options.document, options)


def _open(options: _CorpusOptions) -> "Corpus":
    from megatron_neobert.data.corpus.object_storage import ObjectStorage
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.inputs.stream import is_url

    # Paths may contain bytes that are not valid text.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    cache = options.object_storage_cache_path
    return Corpus(options.prefix, ObjectStorage(Path(cache)) if cache and is_url(options.prefix) else None)


def print_summary(corpus: "Corpus") -> None:
    """Print the manifest of a corpus, and the types of its attributes, as a table."""
    from megatron_neobert.data.corpus.attributes import attribute_types

    manifest = corpus.manifest
    filters = ", ".join(f"{name} {value}" for name, value in manifest.filters.items() if value is not None)
    print_table(
        {
            "corpus": f"{corpus.prefix}, format {manifest.format_version}, megatron-neobert {manifest.project_version}",
            "inputs": f"{len(manifest.inputs):,} with {sum(i.bytes for i in manifest.inputs.values()):,} bytes"
            + (f", text from '{manifest.text_key}'" if manifest.text_key else ", adopted"),
            "filters": filters or "none",
            "attributes": ", ".join(f"{name} ({type_})" for name, type_ in attribute_types(corpus).items()),
            **corpus.describe(),
            "corpus shards": f"{len(manifest.shards):,}, {sum(s.bin.bytes for s in manifest.shards):,} bytes of "
            f"{manifest.dtype} and {sum(s.idx.bytes for s in manifest.shards):,} of index",
            "tokenizer": f"{manifest.tokenizer_fingerprint[:12]}, {manifest.vocab_size:,} ids",
            "sha256": manifest.documents_sha256,
        }
    )


def print_inputs(corpus: "Corpus") -> None:
    """Print a row per input file: number of its first document, documents, tokens, share of all tokens, and name."""
    first, total = 0, corpus.manifest.tokens
    print(f"{'first':>13} {'documents':>13} {'tokens':>17} {'share':>7}  input")
    for name, record in corpus.manifest.inputs.items():
        share = record.tokens / total
        print(f"{first:>13,} {record.documents:>13,} {record.tokens:>17,} {share:>7.2%}  {visible(name)}")
        first += record.documents


def print_documents(corpus: "Corpus", numbers: tuple[int, ...], options: InspectDataOptions) -> None:
    """Print documents, numbered from 0, as text and token ids, at most `options.tokens` tokens of each.

    Raises:
        ConfigError: A document does not exist, or --tokenizer-model is missing.
    """
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    if outside := [number for number in numbers if not 0 <= number < len(corpus)]:
        raise ConfigError(
            f"--document {outside[0]} is not one of the {len(corpus):,} documents of {corpus.prefix}; give numbers "
            f"from 0 to {len(corpus) - 1}"
        )
    if options.tokenizer_model is None:
        raise ConfigError("--document prints text, which needs the tokenizer of the corpus; give --tokenizer-model")
    tokenizer = load_tokenizer(options.tokenizer_model)
    corpus.check_tokenizer(tokenizer)
    for number in numbers:
        ids = corpus.document(number)
        first_ids = ids[: options.tokens].tolist()
        truncated = f", the first {options.tokens:,}" if options.tokens < ids.size else ""
        print(f"document {number:,}: {ids.size:,} tokens{truncated}")
        text = tokenizer.backend.decode(first_ids, skip_special_tokens=False)
        print_table({"text": text, "ids": " ".join(map(str, first_ids))})
        print()


def print_table(values: dict[str, str]) -> None:
    """Print names and values in two columns. Control characters, which come from input files, are escaped."""
    for name, value in values.items():
        print(f"  {visible(name):<18} {visible(value)}")
