"""Checks a corpus: exit 0 if it is sound, else 65 with the file, the byte, what was expected and what was found.

    neobert validate corpus/web_content_document --full

Without --full the indexes are read (sizes, lengths, pointers, manifest), with it every token and all checksums too.
"""

import io
import sys

from megatron_neobert.errors import CommandParser


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("prefix", help="path or URL without .bin, as in PREFIX_content_document")
    parser.add_argument("--object-storage-cache-path", metavar="DIR", help="local folder that a URL is read through")
    parser.add_argument("--full", action="store_true", help="read every token, and compare all checksums")
    arguments = parser.parse_args()
    from megatron_neobert.data.corpus.object_storage import storage_for
    from megatron_neobert.data.corpus.reader import Corpus, check_content, check_indexes

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text

    corpus = Corpus(arguments.prefix, storage_for(arguments.prefix, arguments.object_storage_cache_path))
    (check_content if arguments.full else check_indexes)(corpus)
    manifest = corpus.manifest
    volumes = f" in {len(corpus.volumes):,} volumes" if len(corpus.volumes) > 1 else ""
    print(
        f"{arguments.prefix} is sound{' (all tokens read)' if arguments.full else ' (index)'}: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens as {manifest.dtype}{volumes}, "
        f"{manifest.vocab_size:,} ids of tokenizer {manifest.tokenizer_fingerprint[:12]}"
    )
