"""Finds near-duplicates in finished corpora, and lists which of their documents training is to leave out.

    neobert find-duplicates corpus/web_content_document --output web.drop --workers 16

Of documents that are alike the first one stays: in the order of the corpus, and of several corpora in the order in
which they are named. Training reads the list with --data-path corpus/web_content_document:drop=web.drop; nothing is
copied. The list is byte for byte the same for any --workers, --bucket-documents and restart.
"""

import sys
from pathlib import Path
from typing import Any

from megatron_neobert.errors import CommandParser, ConfigError, positive
from megatron_neobert.text import percent


def main() -> None:
    arguments = _parse()
    from megatron_neobert.data.deduplication.run import FindSettings, MinHashSettings, find_duplicates

    minhash = MinHashSettings(arguments.bands, arguments.rows, arguments.ngram, arguments.threshold)
    names = ("executor", "ray_address", "workers", "bucket_documents", "resume", "overwrite")
    given = {name: getattr(arguments, name) for name in names}
    settings = FindSettings(tuple(arguments.prefixes), arguments.output, minhash, **given)
    found = find_duplicates(settings, on_progress=lambda text: print(text, file=sys.stderr, flush=True))
    _print_summary(found)
    print(f"wrote {arguments.output}")


def _parse() -> Any:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("prefixes", nargs="+", metavar="PREFIX", help="path of a corpus without .bin; of duplicates the earlier wins")
    add("--output", type=Path, required=True, metavar="FILE", help="the drop list, one for all of these corpora")
    add("--threshold", type=float, default=0.8, metavar="J", help="least Jaccard index of near-duplicates (0.8)")
    add("--ngram", type=positive, default=5, metavar="N", help="tokens of a shingle (5)")
    add("--bands", type=positive, default=14, metavar="B", help="of which one must agree (14)")
    add("--rows", type=positive, default=8, metavar="R", help="permutations of a band (8)")
    add("--workers", type=positive, metavar="N", help="processes, one core each (1; with Ray as many as it has CPUs)")
    add("--executor", choices=("local", "ray"), default="local", help="(local)")
    add("--ray-address", metavar="ADDRESS", help="host:port of a cluster (RAY_ADDRESS; at first: a new one)")
    add(
        "--bucket-documents",
        type=positive,
        default=12_000_000,
        metavar="N",
        help="compare so many keys at a time, with 80 bytes of memory each (12,000,000); the list is the same for any",
    )
    add("--resume", action="store_true", help="keep what an earlier run of the same command has finished")
    add("--overwrite", action="store_true", help="replace an existing list, and what another run has begun")
    arguments = parser.parse_args()
    if not 0 < arguments.threshold <= 1:
        raise ConfigError(f"--threshold {arguments.threshold} is not above 0 and at most 1, as a Jaccard index is.")
    return arguments


def _print_summary(found: dict[str, Any]) -> None:
    for corpus in found["corpora"]:
        documents, tokens = corpus["dropped_documents"], corpus["dropped_tokens"]
        print(
            f"{corpus['prefix']}: {documents:,} of {corpus['documents']:,} documents dropped "
            f"({percent(documents / corpus['documents'], digits=2)}), with "
            f"{percent(tokens / corpus['tokens'], digits=2)} of the tokens"
        )
        if documents == corpus["documents"]:
            print(
                f"warning: the list drops all {documents:,} documents of {corpus['prefix']}, and training refuses a "
                "corpus without documents; leave it out of --data-path",
                file=sys.stderr,
            )
    print(f"{found['clusters']:,} clusters of near-duplicates, the largest of {found['largest_cluster']:,} documents")
