"""The commands `neobert inspect data` (a corpus) and `neobert inspect batch` (the input of the model in one iteration).

    neobert inspect data corpus/web_content_document
    neobert inspect data corpus/web_content_document --inputs
    neobert inspect data corpus/web_content_document --tokenizer-model vocab.txt --document 0 17 --tokens 50
    neobert inspect batch --load SAVE --iteration 812
    neobert inspect batch --config FILE --data-path P --tokenizer-model PATH --iteration 1

Documents are printed as the tokenizer decodes their ids. White space differs from the original text; with an uncased
vocabulary, case and accents differ too. Characters that a terminal would act upon are printed as escapes. For a
batch, statistics are printed, then some packed sequences with brackets around each predicted token.
"""

import itertools
import shutil
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.cli import option
from megatron_neobert.data.batches.windows import IGNORED_LABEL
from megatron_neobert.errors import ConfigError
from megatron_neobert.text import percent, visible

if TYPE_CHECKING:  # slow to import
    from megatron_neobert.data.batches.batch import GlobalBatch
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
    from megatron_neobert.inspection.global_batch import Segment

_LEGEND = {
    "[MASK->word]": "predicted; the model sees [MASK]",
    "[other->word]": "predicted; the model sees another token",
    "[=word]": "predicted; the model sees the token itself",
}


@dataclass(frozen=True, kw_only=True)
class InspectDataOptions:
    prefix: str = option(help="path or URL without .bin, as in PREFIX_content_document", positional=True)
    object_storage_cache_path: str | None = option(None, "local folder for the cache of a remote corpus", metavar="DIR")
    document: tuple[int, ...] | None = option(None, "print these documents, counted from 0")
    inputs: bool = option(False, "list the input files, with the documents and tokens of each")
    tokens: int = option(200, "print at most N tokens of each document", minimum=1)
    tokenizer_model: str | None = option(None, "tokenizer with which the corpus was written", metavar="PATH")


def inspect_data(options: InspectDataOptions) -> None:
    """Print a summary of a corpus, its input files (--inputs), or documents (--document)."""
    from megatron_neobert.data.corpus.reader import open_corpus

    corpus = open_corpus(options.prefix, cache=options.object_storage_cache_path)
    if options.inputs:
        first, total = 0, corpus.manifest.tokens
        print(f"{'first':>13} {'documents':>13} {'tokens':>17} {'share':>7}  input")
        for name, record in corpus.manifest.inputs.items():
            share = record.tokens / total
            print(f"{first:>13,} {record.documents:>13,} {record.tokens:>17,} {share:>7.2%}  {visible(name)}")
            first += record.documents
    elif not options.document:
        print_summary(corpus)
    if not options.document:
        return
    if outside := [number for number in options.document if not 0 <= number < len(corpus)]:
        raise ConfigError(
            f"--document {outside[0]} is not one of the {len(corpus):,} documents of {corpus.prefix}; give numbers "
            f"from 0 to {len(corpus) - 1}"
        )
    if options.tokenizer_model is None:
        raise ConfigError("--document prints text, which needs the tokenizer of the corpus; give --tokenizer-model")
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer_model)
    corpus.check_tokenizer(tokenizer)
    for number in options.document:
        ids = corpus.document(number)
        first_ids = ids[: options.tokens].tolist()
        truncated = f", the first {options.tokens:,}" if options.tokens < ids.size else ""
        print(f"document {number:,}: {ids.size:,} tokens{truncated}")
        print_table({"text": tokenizer.decode(first_ids), "ids": " ".join(map(str, first_ids))})
        print()


def print_summary(corpus: "Corpus") -> None:
    """Print the manifest of a corpus, and the types of its attributes, as a table."""
    from megatron_neobert.data.corpus.attributes import attribute_types
    from megatron_neobert.data.inputs.records import ReadSettings

    manifest = corpus.manifest
    defaults = ReadSettings()
    changed = (pair for pair in manifest.filters.items() if pair[1] not in (None, getattr(defaults, pair[0], None)))
    print_table(
        {
            "corpus": f"{corpus.prefix}, format {manifest.format_version}, megatron-neobert {manifest.project_version}",
            "inputs": f"{len(manifest.inputs):,} with {sum(i.bytes for i in manifest.inputs.values()):,} bytes"
            + (f", text from '{manifest.text_key}'" if manifest.text_key else ", adopted"),
            "options": ", ".join(f"{name} {value}" for name, value in changed) or "defaults",
            "attributes": ", ".join(f"{name} ({type_})" for name, type_ in attribute_types(corpus).items()),
            **corpus.describe(),
            "corpus shards": f"{len(manifest.shards):,}, {sum(s.bin.bytes for s in manifest.shards):,} bytes of "
            f"{manifest.dtype} and {sum(s.idx.bytes for s in manifest.shards):,} of index",
            "tokenizer": f"{manifest.tokenizer_fingerprint[:12]}, {manifest.vocab_size:,} ids",
            "sha256": manifest.documents_sha256,
        }
    )


def print_table(values: dict[str, str]) -> None:
    """Print names and values in two columns. Control characters, which come from input files, are escaped."""
    for name, value in values.items():
        print(f"  {visible(name):<18} {visible(value)}")


# --- one batch


@dataclass(frozen=True, kw_only=True)
class InspectBatchOptions:
    """Options of `neobert inspect batch`, besides the flags of `neobert train`."""

    iteration: int = option(help="iteration of the batch; the first is 1", metavar="K", minimum=1)
    load: Path | None = option(None, "folder of a run (its --save)", metavar="SAVE")
    rows: int = option(4, "packed sequences to show as text; 0 shows only the statistics", minimum=0)


def inspect_batch(options: InspectBatchOptions, flags: list[str]) -> None:
    """Print statistics and text of one iteration's batch.

    Training code builds the batch of all ranks. No model is built and no file is written. --load starts from the
    run's newest checkpoint before the iteration, and takes the run's settings unless --config is given. `flags` of
    `neobert train` override settings of the run.
    """
    from megatron_neobert.data.batches.corpora import open_phases
    from megatron_neobert.inspection.global_batch import open_iteration, read_segments, rebuild_batch

    settings, checkpoint = open_iteration(options.load, options.iteration, flags)
    opened = open_phases(settings)
    batch = rebuild_batch(settings, opened, options.iteration, checkpoint=checkpoint)
    segments = list(read_segments(batch))
    print(f"batch {options.iteration:,}", *describe(batch, segments), sep="\n  ")
    if batch.phase.settings.data.objective == "mlm":
        print("", *(f"  {mark:15}{meaning}" for mark, meaning in _LEGEND.items()), sep="\n")
    columns = shutil.get_terminal_size((120, 24)).columns
    for number, sequence in itertools.groupby(segments, key=lambda segment: segment.sequence):
        if number == options.rows:
            break
        print(f"\npacked sequence {number:,}")
        for segment in sequence:
            print(
                f"  document {segment.document:,} of {visible(segment.corpus)}, epoch {segment.epoch}: "
                f"{segment.text_tokens:,} of {segment.document_tokens:,} tokens from token {segment.first_token:,} on"
            )
            text = to_text(segment, opened[0].tokenizer)
            print(textwrap.fill(text, columns, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))


def describe(batch: "GlobalBatch", segments: "list[Segment]") -> list[str]:
    """Return the statistics of a global batch as lines: packing, documents and predicted tokens."""
    data, training = batch.phase.settings.data, batch.phase.settings.training
    lengths = [len(segment.input_ids_s) for segment in segments]
    capacity, tokens = training.global_batch_size * data.seq_length, sum(lengths)
    kinds = Counter(
        "hidden" if input_id == batch.phase.token_ids.mask else "left as they are" if input_id == label else "replaced"
        for segment in segments
        for input_id, label in zip(segment.input_ids_s.tolist(), segment.labels_s.tolist(), strict=True)
        if label != IGNORED_LABEL
    )
    cut = sum(segment.text_tokens < segment.document_tokens for segment in segments)
    predicted = f"{kinds.total():,} predicted tokens, {percent(kinds.total() / tokens)} of all: " + ", ".join(
        f"{count:,} {kind}" for kind, count in sorted(kinds.items())
    )
    micro_batches = training.global_batch_size // training.micro_batch_size
    return [
        f"{training.global_batch_size:,} packed sequences of {data.seq_length:,} tokens in "
        f"{micro_batches:,} micro-batches; packing efficiency {percent(tokens / capacity, digits=2)}",
        f"{len(segments):,} documents or pieces, {cut:,} of them cut; {min(lengths):,} to {max(lengths):,} tokens each",
        "every next token is predicted (--objective clm)" if data.objective == "clm" else predicted,
    ]


def to_text(segment: "Segment", tokenizer: "Tokenizer") -> str:
    """Return the tokens of a segment as text. Predicted tokens are `[input->label]`, or `[=label]` if unchanged."""

    def entry(token_id: int) -> str:
        return visible(str(tokenizer.backend.id_to_token(token_id)))

    words = []
    for input_id, label in zip(segment.input_ids_s.tolist(), segment.labels_s.tolist(), strict=True):
        if label == IGNORED_LABEL:
            words.append(entry(input_id))
        else:
            shown = "=" if input_id == label else f"{entry(input_id).strip('[]')}->"
            words.append(f"[{shown}{entry(label)}]")
    return " ".join(words)
