"""The commands that read a corpus: `neobert validate` checks it, `neobert inspect data` shows what is in it.

    neobert validate corpus/web_content_document --full
    neobert inspect data corpus/web_content_document
    neobert inspect data corpus/web_content_document --inputs
    neobert inspect data corpus/web_content_document --tokenizer-model vocab.txt --document 0 17 --tokens 50

The text of a document is what the tokenizer makes of the ids, so white space, and for an uncased vocabulary case and
accents, are not those of the original. Characters that a terminal would act upon are shown as escapes.
"""

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.cli import option
from megatron_neobert.errors import ConfigError
from megatron_neobert.text import visible

if TYPE_CHECKING:  # a missing package is reported by run_command
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class _CorpusOptions:
    prefix: str = option(help="path or URL without .bin, as in PREFIX_content_document", positional=True)
    object_storage_cache_path: str | None = option(None, "local folder that a URL is read through", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(_CorpusOptions):
    """The command line of `neobert validate`."""

    full: bool = option(False, "read every token, and compare all checksums")


def validate(options: ValidateOptions) -> None:
    """Check a corpus: exit 0 if it is sound, else 65 with the file, the byte, what was expected and what was found.

    Without --full the indexes are read (sizes, lengths, pointers, manifest), with it every token and all checksums too.
    """
    from megatron_neobert.data.corpus.reader import check_content, check_indexes

    corpus = _open(options.prefix, options.object_storage_cache_path)
    (check_content if options.full else check_indexes)(corpus)
    manifest = corpus.manifest
    volumes = f" in {len(corpus.volumes):,} volumes" if len(corpus.volumes) > 1 else ""
    print(
        f"{options.prefix} is sound{' (all tokens read)' if options.full else ' (index)'}: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens as {manifest.dtype}{volumes}, "
        f"{manifest.vocab_size:,} ids of tokenizer {manifest.tokenizer_fingerprint[:12]}"
    )


@dataclass(frozen=True, kw_only=True)
class InspectDataOptions(_CorpusOptions):
    """The command line of `neobert inspect data`."""

    document: tuple[int, ...] | None = option(None, "show these documents, counted from 0")
    inputs: bool = option(False, "list the inputs, with documents and tokens of each")
    tokens: int = option(200, "show at most N tokens of each document", minimum=1)
    tokenizer_model: str | None = option(None, "tokenizer that the corpus was written with", metavar="PATH")
    tokenizer_type: str = option("auto", "type of the tokenizer, as in preprocessing")


def inspect_data(options: InspectDataOptions) -> None:
    """Show what is in a corpus: a summary, or documents as text and token ids."""
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    corpus = _open(options.prefix, options.object_storage_cache_path)
    numbers = options.document or ()
    if options.inputs:
        print_inputs(corpus)
    elif not numbers:
        print_summary(corpus)
    if not numbers:
        return
    if outside := [number for number in numbers if not 0 <= number < len(corpus)]:
        raise ConfigError(
            f"--document {outside[0]} is none of the {len(corpus):,} documents of {corpus.prefix}; they are numbered "
            f"0 to {len(corpus) - 1}"
        )
    if options.tokenizer_model is None:
        raise ConfigError("--document shows text, which takes the corpus's tokenizer; give --tokenizer-model")
    tokenizer = load_tokenizer(options.tokenizer_model, options.tokenizer_type)
    corpus.check_tokenizer(tokenizer)
    for number in numbers:
        print_document(corpus, number, tokenizer, tokens=options.tokens)


def _open(prefix: str, cache_path: str | None) -> "Corpus":
    from megatron_neobert.data.corpus.object_storage import ObjectStorage
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.inputs.stream import is_url

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text
    if not is_url(prefix):
        return Corpus(prefix)
    if cache_path is None:
        raise ConfigError(f"{prefix} is read through a folder on a local disk; name one: --object-storage-cache-path.")
    return Corpus(prefix, ObjectStorage(Path(cache_path)))


def print_summary(corpus: "Corpus") -> None:
    from megatron_neobert.data.corpus.attributes import attribute_types

    manifest = corpus.manifest
    filters = ", ".join(f"{name} {value}" for name, value in manifest.filters.items() if value is not None)
    print_rows(
        {
            "corpus": f"{corpus.prefix}, format {manifest.format_version}, megatron-neobert {manifest.project_version}",
            "inputs": f"{len(manifest.inputs):,} with {sum(i.bytes for i in manifest.inputs.values()):,} bytes"
            + (f", text from '{manifest.text_key}'" if manifest.text_key else ", adopted"),
            "filters": filters or "none",
            "attributes": ", ".join(f"{name} ({kind})" for name, kind in attribute_types(corpus).items()),
            **manifest.describe(),
            "volumes": f"{len(manifest.volumes):,}, {sum(v.bin.bytes for v in manifest.volumes):,} bytes of "
            f"{manifest.dtype} and {sum(v.idx.bytes for v in manifest.volumes):,} of index",
            "tokenizer": f"{manifest.tokenizer_fingerprint[:12]}, {manifest.vocab_size:,} ids",
            "sha256": manifest.sha256,
        }
    )


def print_inputs(corpus: "Corpus") -> None:
    """Print a line for each input in the order of the corpus, with the number of its first document."""
    first, total = 0, corpus.manifest.tokens
    print(f"{'first':>13} {'documents':>13} {'tokens':>17} {'share':>7}  input")
    for name, record in corpus.manifest.inputs.items():
        print(
            f"{first:>13,} {record.documents:>13,} {record.tokens:>17,} {record.tokens / total:>7.2%}  {visible(name)}"
        )
        first += record.documents


def print_document(corpus: "Corpus", number: int, tokenizer: "Tokenizer", *, tokens: int) -> None:
    ids = corpus.document(number)
    cut = f", the first {tokens:,}" if tokens < ids.size else ""
    shown = ids[:tokens].tolist()
    text = tokenizer.backend.decode(shown, skip_special_tokens=False)
    print(f"document {number:,}: {ids.size:,} tokens{cut}")
    print_rows({"text": text, "ids": " ".join(map(str, shown))})
    print()


def print_rows(rows: dict[str, str]) -> None:
    """Print names and values in two columns. What a stranger put there is escaped."""
    for name, value in rows.items():
        print(f"  {visible(name):<18} {visible(value)}")
