"""Shows what is in a corpus: a summary, or documents as text and token ids.

    neobert inspect data corpus/web_content_document
    neobert inspect data corpus/web_content_document --inputs
    neobert inspect data corpus/web_content_document --sources
    neobert inspect data corpus/web_content_document --tokenizer-model vocab.txt --random 3
    neobert inspect data corpus/web_content_document --tokenizer-model vocab.txt --document 0 17 --tokens 50

The text is what the tokenizer makes of the ids, so white space, and for an uncased vocabulary case and accents, are not
those of the original. Characters that a terminal would act upon are shown as escapes.
"""

import argparse
import io
import random
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_neobert.errors import CommandParser, ConfigError, DataError
from megatron_neobert.text import visible

if TYPE_CHECKING:  # a missing package is reported by run_command
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

_WIDTH = 80  # columns of a terminal
_NAME_WIDTH = 18  # columns of them for names
_CHUNK = 1 << 20  # lengths compared at a time


def main() -> None:
    arguments = parse_arguments()
    from megatron_neobert.data.corpus.object_storage import storage_for
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes
    corpus = Corpus(arguments.prefix, storage_for(arguments.prefix, arguments.object_storage_cache_path))
    if arguments.inputs or arguments.sources:
        (print_inputs if arguments.inputs else print_sources)(corpus)
        return
    numbers = choose_documents(corpus, arguments)
    if numbers is None:
        print_summary(corpus)
        return
    if arguments.tokenizer_model is None:
        raise ConfigError(
            "--document, --random and --longest show text, which takes the corpus's tokenizer; give --tokenizer-model"
        )
    tokenizer = load_tokenizer(arguments.tokenizer_model, arguments.tokenizer_type)
    corpus.check_tokenizer(tokenizer)
    for number in numbers:
        print_document(corpus, number, tokenizer, tokens=arguments.tokens)


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("prefix", help="path or URL without .bin, as in PREFIX_content_document")
    add("--object-storage-cache-path", metavar="DIR", help="local folder that a URL is read through")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--document", type=int, nargs="+", metavar="N", help="show these documents, counted from 0")
    which.add_argument("--random", type=int, metavar="K", help="show K documents chosen at random")
    which.add_argument("--longest", type=int, metavar="K", help="show the K longest documents")
    which.add_argument("--inputs", action="store_true", help="list the inputs, with documents and tokens of each")
    which.add_argument("--sources", action="store_true", help="list documents and tokens by --source-key's values")
    add("--seed", type=int, default=0, help="of --random (default: 0)")
    add("--tokens", type=int, default=200, metavar="N", help="at most N of each (default: 200)")
    add("--tokenizer-model", metavar="PATH", help="that the corpus was written with")
    add("--tokenizer-type", default="auto", metavar="TYPE", help="as in preprocessing (default: auto)")
    return parser.parse_args()


def choose_documents(corpus: "Corpus", arguments: argparse.Namespace) -> Sequence[int] | None:
    """Numbers of the documents to show; None: none was asked for.

    Raises:
        ConfigError: A number that the corpus does not have.
    """
    documents = len(corpus)
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens {arguments.tokens} shows nothing; give at least 1")
    if arguments.document is not None:
        if outside := [number for number in arguments.document if not 0 <= number < documents]:
            raise ConfigError(
                f"--document {outside[0]} is none of the {documents:,} documents of {corpus.prefix}; they are numbered "
                f"0 to {documents - 1}"
            )
        return list(arguments.document)
    for name in ("random", "longest"):
        count = getattr(arguments, name)
        if count is not None and not 1 <= count <= documents:
            raise ConfigError(
                f"--{name} {count} is not a number of documents of {corpus.prefix}, which has {documents:,}; give 1 to "
                f"{documents}"
            )
    if arguments.random is not None:
        return random.Random(arguments.seed).sample(range(documents), arguments.random)
    return None if arguments.longest is None else find_longest(corpus, arguments.longest)


def print_summary(corpus: "Corpus") -> None:
    manifest = corpus.manifest
    filters = ", ".join(f"{name} {value}" for name, value in manifest.filters.items() if value is not None)
    print_rows(
        {
            "corpus": f"{corpus.prefix}, format {manifest.format_version}, megatron-neobert {manifest.project_version}",
            "inputs": f"{len(manifest.inputs):,} with {sum(i.bytes for i in manifest.inputs.values()):,} bytes"
            + (f", text from '{manifest.text_key}'" if manifest.text_key else ", adopted"),
            "filters": filters or "none",
            **manifest.describe(),
            "volumes": f"{len(manifest.volumes):,}, {sum(v.bin.bytes for v in manifest.volumes):,} bytes of "
            f"{manifest.dtype} and {sum(v.idx.bytes for v in manifest.volumes):,} of index",
            "tokenizer": f"{manifest.tokenizer_fingerprint[:12]}, {manifest.vocab_size:,} ids",
            "sha256": manifest.sha256,
        }
    )


def print_inputs(corpus: "Corpus") -> None:
    """A line for each input in the order of the corpus, with the number of its first document."""
    first, total = 0, corpus.manifest.tokens
    print(f"{'first':>13} {'documents':>13} {'tokens':>17} {'share':>7}  input")
    for name, record in corpus.manifest.inputs.items():
        if record.documents is None or record.tokens is None:
            raise DataError(f"{corpus.files.manifest} does not count its inputs; preprocess again for that")
        print(
            f"{first:>13,} {record.documents:>13,} {record.tokens:>17,} {record.tokens / total:>7.2%}  {visible(name)}"
        )
        first += record.documents


def print_sources(corpus: "Corpus") -> None:
    """A line for each source, the one with most tokens first."""
    if (key := corpus.manifest.source_key) is None:
        raise DataError(f"{corpus.files.manifest} does not count sources; preprocess with --source-key for that")
    total = corpus.manifest.tokens
    print(f"{'documents':>13} {'tokens':>17} {'share':>7}  {visible(key)}")
    for name, record in sorted(corpus.manifest.sources.items(), key=lambda item: (-item[1].tokens, item[0])):
        print(f"{record.documents:>13,} {record.tokens:>17,} {record.tokens / total:>7.2%}  {visible(name)}")


def print_document(corpus: "Corpus", number: int, tokenizer: "Tokenizer", *, tokens: int) -> None:
    ids = corpus.document(number)
    cut = f", the first {tokens:,}" if tokens < ids.size else ""
    shown = ids[:tokens].tolist()
    text = tokenizer.backend.decode(shown, skip_special_tokens=False)
    print(f"document {number:,}: {ids.size:,} tokens{cut}")
    print_rows({"text": text, "ids": " ".join(map(str, shown))})
    print()


def find_longest(corpus: "Corpus", count: int) -> list[int]:
    """Numbers of the `count` longest documents, the longest first, among equals the first first."""
    import numpy as np

    first, best = 0, np.zeros((0, 2), dtype=np.int64)  # -length, number
    for volume in corpus.volumes:
        for begin in range(0, volume.lengths.size, _CHUNK):
            lengths = volume.lengths[begin : begin + _CHUNK].astype(np.int64)
            numbers = np.arange(first + begin, first + begin + lengths.size)
            long = lengths >= np.partition(lengths, -min(count, lengths.size))[-min(count, lengths.size)]
            best = np.concatenate([best, np.stack([-lengths, numbers], axis=1)[long]])
            best = best[np.lexsort((best[:, 1], best[:, 0]))][:count]
        first += volume.lengths.size
    return [int(number) for number in best[:, 1]]


def print_rows(rows: dict[str, str]) -> None:
    """Names to the left, values to the right of them, their lines wrapped. What a stranger put there is escaped."""
    width = _WIDTH - _NAME_WIDTH - 3
    for name, value in rows.items():
        name = visible(name)
        lines = [
            line
            for paragraph in visible(value, keep="\n\t").split("\n")
            for line in textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False) or [""]
        ]
        print(f"  {name:<{_NAME_WIDTH}} {lines[0]}")
        for line in lines[1:]:
            print(" " * (_NAME_WIDTH + 3) + line)
