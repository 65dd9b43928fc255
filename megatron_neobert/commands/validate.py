"""The command `neobert validate`: check the files of a corpus.

neobert validate corpus/web_content_document --full
"""

from dataclasses import dataclass

from megatron_neobert.cli import option


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    prefix: str = option(help="path or URL without .bin, as in PREFIX_content_document", positional=True)
    object_storage_cache_path: str | None = option(None, "local folder for the cache of a remote corpus", metavar="DIR")
    full: bool = option(False, "also read every token and compare all checksums")


def validate(options: ValidateOptions) -> None:
    """Check a corpus, and print a summary if it is sound. Exit with code 65 and a message if it is damaged.

    Without --full, the command reads the manifest and the indexes (sizes, lengths, pointers), but no token ids.
    """
    from megatron_neobert.data.corpus.attributes import check_attributes
    from megatron_neobert.data.corpus.reader import check_content, check_indexes, open_corpus

    corpus = open_corpus(options.prefix, cache=options.object_storage_cache_path)
    if options.full:
        check_content(corpus)
        check_attributes(corpus)
    else:
        check_indexes(corpus)
    manifest = corpus.manifest
    shards = f" in {len(corpus.shards):,} corpus shards" if len(corpus.shards) > 1 else ""
    print(
        f"{options.prefix} is sound{' (all tokens read)' if options.full else ' (index)'}: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens as {manifest.dtype}{shards}, "
        f"{manifest.vocab_size:,} ids of tokenizer {manifest.tokenizer_fingerprint[:12]}"
    )
