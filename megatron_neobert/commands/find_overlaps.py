"""The command `neobert find-overlaps`: list the documents of corpora that share an n-gram with evaluation texts."""

from megatron_neobert.data.deduplication import overlaps
from megatron_neobert.data.deduplication.overlaps import OverlapSettings
from megatron_neobert.text import percent


def find_overlaps(options: OverlapSettings) -> None:
    """List the documents that share an n-gram of tokens with evaluation texts, so that training can leave them out.

    Training skips the listed documents with --data-path PREFIX:drop=FILE. With --resume, nothing is done if the list is
    complete.
    """
    found = overlaps.find_overlaps(options)
    if found is None:
        print(f"{options.output} is complete; nothing to do")
        return
    searched, evaluated = found
    for entry in searched:
        count, share = entry.dropped_documents, percent(entry.dropped_documents / entry.documents, digits=2)
        print(f"{entry.prefix}: {count:,} of {entry.documents:,} documents share {options.ngram} tokens ({share})")
    for each in evaluated:
        print(
            f"{each.prefix}: {each.shared:,} of {each.texts:,} texts share {options.ngram} tokens; "
            f"{each.short:,} are shorter and were not searched for"
        )
    print(f"wrote {options.output}")
