"""The command `neobert inspect batch`: what the model sees in one iteration, and which tokens it has to predict.

neobert inspect batch --load SAVE --iteration 812
neobert inspect batch --config FILE --data-path P --tokenizer-model PATH --iteration 1

Prints statistics of the batch, then some packed sequences as entries of the vocabulary, with brackets around each
predicted token.
"""

import io
import itertools
import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.cli import option
from megatron_neobert.data.batches.windows import IGNORED_LABEL
from megatron_neobert.text import percent, visible

if TYPE_CHECKING:  # slow to import
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
    from megatron_neobert.inspection.global_batch import RebuiltBatch, Segment

_LEGEND = {
    "[MASK->word]": "predicted; the model sees [MASK]",
    "[other->word]": "predicted; the model sees another token",
    "[=word]": "predicted; the model sees the token itself",
}


@dataclass(frozen=True, kw_only=True)
class InspectBatchOptions:
    """Options of `neobert inspect batch`, besides the flags of `neobert train`."""

    iteration: int = option(help="iteration of the batch; the first is 1", metavar="K", minimum=1)
    load: Path | None = option(None, "folder of a run (its --save)", metavar="SAVE")
    rows: int = option(4, "packed sequences to show as text; 0 shows only the statistics", minimum=0)


def inspect_batch(options: InspectBatchOptions, flags: list[str]) -> None:
    """Print statistics and text of one iteration's batch.

    The code of training builds the batch of all ranks. No model is built and no file is written. --load starts from the
    run's newest checkpoint before the iteration, and takes the run's settings unless --config is given.

    Args:
        flags: Flags of `neobert train`, which override settings of the run.

    Raises:
        NeoBERTError: As `open_iteration` and `rebuild_batch`.
    """
    from megatron_neobert.inspection.global_batch import open_iteration, read_segments, rebuild_batch

    settings, checkpoint = open_iteration(options.load, options.iteration, flags)
    batch = rebuild_batch(settings, options.iteration, checkpoint=checkpoint)
    segments = list(read_segments(batch))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without UTF-8 shows escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    print(f"batch {options.iteration:,}", *describe(batch, segments), sep="\n  ")
    if batch.settings.data.objective == "mlm":
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
            text = to_text(segment, batch.tokenizer)
            print(textwrap.fill(text, columns, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))


def describe(batch: "RebuiltBatch", segments: "list[Segment]") -> list[str]:
    """Return the statistics of a global batch as lines: packing, documents and predicted tokens."""
    data, training = batch.settings.data, batch.settings.training
    lengths = [len(segment.input_ids_s) for segment in segments]
    capacity, tokens = training.global_batch_size * data.seq_length, sum(lengths)
    kinds = Counter(
        "hidden" if input_id == batch.tokenizer.mask_id else "left as they are" if input_id == label else "replaced"
        for segment in segments
        for input_id, label in zip(segment.input_ids_s.tolist(), segment.labels_s.tolist(), strict=True)
        if label != IGNORED_LABEL
    )
    predicted = f"{kinds.total():,} predicted tokens, {percent(kinds.total() / tokens)} of all: " + ", ".join(
        f"{count:,} {kind}" for kind, count in sorted(kinds.items())
    )
    return [
        f"{training.global_batch_size:,} packed sequences of {data.seq_length:,} tokens in "
        f"{len(batch.micro_batches):,} micro-batches; packing efficiency {percent(tokens / capacity, digits=2)}",
        f"{len(segments):,} segments of {min(lengths):,} to {max(lengths):,} tokens, "
        f"{sum(segment.text_tokens < segment.document_tokens for segment in segments):,} of them parts of documents",
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
