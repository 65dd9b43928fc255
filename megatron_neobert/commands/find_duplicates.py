"""The command `neobert find-duplicates`: list near-duplicate documents of corpora."""

from megatron_neobert.data.deduplication import run
from megatron_neobert.data.deduplication.run import FindSettings
from megatron_neobert.text import percent


def find_duplicates(options: FindSettings) -> None:
    """Find duplicates in finished corpora, and write a drop list of all but the first document of each cluster.

    Equal documents are always found, near-duplicates by MinHash. With --threshold 1, only equal documents are searched.

    Training skips the listed documents with --data-path PREFIX:drop=FILE; no corpus is copied. With --resume, nothing
    is done if the list is complete.
    """
    entries = run.find_duplicates(options)
    if entries is None:
        print(f"{options.output} is complete; nothing to do")
        return
    for entry in entries:
        print(
            f"{entry.prefix}: {entry.dropped_documents:,} of {entry.documents:,} documents dropped "
            f"({percent(entry.dropped_documents / entry.documents, digits=2)})"
        )
    added = f", added {options.add_attribute} to each corpus" if options.add_attribute is not None else ""
    print(f"wrote {options.output}{added}")
