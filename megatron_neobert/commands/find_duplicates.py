"""The command `neobert find-duplicates`: list near-duplicate documents of corpora."""

from dataclasses import asdict

from megatron_neobert.data.deduplication import run
from megatron_neobert.data.deduplication.run import FindSettings
from megatron_neobert.data.deduplication.search import is_complete, job_folder, open_corpora
from megatron_neobert.text import percent


def find_duplicates(options: FindSettings) -> None:
    """Find duplicates in finished corpora, and write a drop list of all but the first document of each cluster.

    Equal documents are always found, near-duplicates by MinHash. With --threshold 1, only equal documents are searched.

    Training skips the listed documents with --data-path PREFIX:drop=FILE; no corpus is copied. With --resume, nothing
    is done if the list is complete.
    """
    corpora = open_corpora(options.prefixes)
    origin = options.origin(corpora)
    has_attribute = options.add_attribute is None or all(origin in c.manifest.added_attributes for c in corpora)
    if options.resume and has_attribute and is_complete(options, corpora, asdict(options.minhash)):
        job_folder(options).sweep()
        print(f"{options.output} is complete; nothing to do")
        return
    for entry in run.find_duplicates(options):
        print(
            f"{entry.prefix}: {entry.dropped_documents:,} of {entry.documents:,} documents dropped "
            f"({percent(entry.dropped_documents / entry.documents, digits=2)})"
        )
    added = f", added {options.add_attribute} to each corpus" if options.add_attribute is not None else ""
    print(f"wrote {options.output}{added}")
