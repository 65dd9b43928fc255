"""Masks the documents' tokens one at a time, in batches of rows of similar length.

The longest documents come first: what does not fit into memory is found at once, and the time that remains is not
underrated. Each document is written when its last position is done, and not done again.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import variance
from typing import Any

from megatron_neobert.evaluation.encoders import fingerprint
from megatron_neobert.evaluation.pseudo_perplexity.documents import Choice, Document
from megatron_neobert.evaluation.pseudo_perplexity.results import DocumentResult, ResultFile
from megatron_neobert.evaluation.pseudo_perplexity.scorer import Row, Scorer


def protocol_of(scorer: Scorer, choice: Choice) -> dict[str, Any]:
    """What a document's result depends on, beside the document."""
    return {
        "model": fingerprint(scorer.folder),
        "tokenizer": scorer.tokenizer_fingerprint,
        "max_length": choice.max_length,
        "positions_per_document": choice.positions_per_document,
        "seed": None if choice.positions_per_document is None else choice.seed,
        "dtype": str(scorer.model.dtype).removeprefix("torch."),
        "attention": scorer.model.config._attn_implementation,
    }


def name_of(protocol: dict[str, Any]) -> str:
    """Twelve digits; results of another protocol are other files."""
    return hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:12]


def measure(
    scorer: Scorer,
    documents: Sequence[Document],
    file: ResultFile,
    *,
    batch_tokens: int,
    on_progress: Callable[[int], None],
) -> None:
    """Measures the documents that are not in the file yet, and adds them to it.

    Args:
        batch_tokens: Rows times the longest of them, at most, unless a single row is longer.
        on_progress: Called with the tokens of each batch, padding not counted.
    """
    collected: dict[str, _Collected] = {}
    for batch in batches(missing_in(file, documents), batch_tokens=batch_tokens):
        losses = scorer.score([Row(document.ids_s, position) for document, position in batch])
        for (document, _), loss in zip(batch, losses, strict=True):
            held = collected.setdefault(document.id, _Collected(document))
            held.losses.append(loss)
            if len(held.losses) == len(document.positions):
                file.add(collected.pop(document.id).to_result())
        on_progress(sum(len(document.ids_s) for document, _ in batch))


def missing_in(file: ResultFile, documents: Iterable[Document]) -> list[Document]:
    return [document for document in documents if document.id not in file.results]


def batches(documents: Iterable[Document], *, batch_tokens: int) -> Iterator[list[tuple[Document, int]]]:
    """Every position of every document once, the longest documents first, in batches of similar length."""
    batch: list[tuple[Document, int]] = []
    for document in sorted(documents, key=lambda document: (-len(document.ids_s), document.id)):
        for position in document.positions:
            if batch and (len(batch) + 1) * len(batch[0][0].ids_s) > batch_tokens:
                yield batch
                batch = []
            batch.append((document, position))
    if batch:
        yield batch


def cost(documents: Iterable[Document]) -> int:
    """Tokens that the model has to read, padding not counted."""
    return sum(len(document.positions) * len(document.ids_s) for document in documents)


@dataclass
class _Collected:
    document: Document
    losses: list[float] = field(default_factory=list)

    def to_result(self) -> DocumentResult:
        document = self.document
        return DocumentResult(
            id=document.id,
            length=len(document.ids_s),
            truncated=document.truncated,
            tokens=document.scorable,
            positions=len(self.losses),
            nll_sum=math.fsum(self.losses),
            nll_variance=variance(self.losses) if len(self.losses) > 1 else None,
        )
