"""Checks a corpus: exit 0 if it is sound, else 65 with the file, the byte, what was expected and what was found.

    python tools/validate_data.py corpus/web_content_document --full

Without --full only the index is read (sizes, lengths, pointers, manifest); with it every token and both checksums.
"""

import argparse

from megatron_neobert.data.corpus import Corpus, check_content
from megatron_neobert.errors import run_command


def main() -> None:
    parser = argparse.ArgumentParser(description="Check a corpus written by tools/preprocess_data.py.")
    parser.add_argument("prefix", help="path without .bin, as in PREFIX_content_document")
    parser.add_argument("--full", action="store_true", help="read every token, and compare both checksums")
    arguments = parser.parse_args()

    corpus = Corpus(arguments.prefix)
    if arguments.full:
        check_content(corpus)
    manifest = corpus.manifest
    print(
        f"{arguments.prefix} is sound{' (all tokens read)' if arguments.full else ' (index)'}: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens as {manifest.dtype}, "
        f"{manifest.vocab_size:,} ids of tokenizer {manifest.tokenizer_fingerprint[:12]}"
    )


if __name__ == "__main__":
    run_command(main)
