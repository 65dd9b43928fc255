"""Pseudo-perplexity, exp(-1/N sum log p(x_i | x without i)): how sure a model is of each token given all the others.

Tokens that the tokenizer adds are neither masked nor counted. Costs as many forwards as tokens are masked, so a text of
4,096 tokens costs 4,096 of them unless positions are drawn. Tokens are masked one at a time, in batches of documents of
similar length. The longest documents come first: what does not fit into memory is found at once, and the time that
remains is not underrated. Each document is written when its last position is done, and not done again.

Of a document with N tokens of which K were drawn, the mean loss has the standard error s sqrt((1 - K/N) / K), s² being
the variance of the K losses: none when all tokens were masked. Documents are averaged as logarithms, because there the
drawing is unbiased, while exp raises every drawn value. The band is the 95 % Student interval of that average over the
documents of a bin, each taken as one observation, so it holds the noise of the drawing as well.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from scipy.stats import t as student

from megatron_neobert.data.inputs.find import input_label
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.encoders import LoadOptions, fingerprint
from megatron_neobert.evaluation.pages import to_csv
from megatron_neobert.evaluation.pseudo_perplexity.documents import Choice, Document, bin_of, select_documents
from megatron_neobert.evaluation.pseudo_perplexity.scorer import Row, Scorer
from megatron_neobert.evaluation.records import LineFile, hold, write_record
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.runtime.atomic_files import replace_file

BAND = "95 % of the average over documents"
_CONFIDENCE = 0.95  # of the band above
_DOCUMENTS_OF_BAND = 5  # of fewer, Student's interval spans orders of magnitude


@dataclass(frozen=True, kw_only=True)
class DocumentResult:
    """One line of the file of documents; losses in nats."""

    id: str
    length: int  # tokens of the row, those that the tokenizer adds included
    truncated: bool
    tokens: int  # that could be masked
    positions: int  # that were
    nll_sum: float
    nll_variance: float | None  # of the positions' losses; None of a single one

    @property
    def mean_nll(self) -> float:
        return self.nll_sum / self.positions

    @property
    def standard_error(self) -> float | None:
        """Of `mean_nll`, for the positions that were not drawn; None where one position tells nothing about others."""
        if self.positions == self.tokens:
            return 0.0
        if self.nll_variance is None:
            return None
        return math.sqrt(self.nll_variance / self.positions * (1 - self.positions / self.tokens))


# Of a point of the curve; `low` and `high` are None where there are too few documents to know their spread.
COLUMNS = ("above", "up_to", "documents", "mean_length", "pseudo_perplexity", "low", "high", "arithmetic_mean")


def read_results(file: LineFile) -> dict[str, DocumentResult]:
    """The documents that have been measured, by id.

    Raises:
        DataError: Some whole line is not one of these.
    """
    try:
        found = [DocumentResult(**line) for line in file.lines]
    except TypeError as error:
        raise DataError(f"{file.path}: not results of documents ({error}); remove the file.") from error
    return {result.id: result for result in found}


def average_by_length(results: Iterable[DocumentResult], length_bins: Sequence[int]) -> list[dict[str, Any]]:
    """The curve: one point per bin that has documents, by increasing length."""
    groups: dict[int, list[DocumentResult]] = {}
    for result in results:
        groups.setdefault(bin_of(result.length, length_bins), []).append(result)
    curve = []
    for number in sorted(groups):
        losses = [result.mean_nll for result in groups[number]]
        mean = fmean(losses)
        band: list[float | None] = [None, None]
        if len(losses) >= _DOCUMENTS_OF_BAND:
            half = float(student.ppf((1 + _CONFIDENCE) / 2, len(losses) - 1)) * stdev(losses) / math.sqrt(len(losses))
            band = [math.exp(mean - half), math.exp(mean + half)]
        ends = (0, *length_bins, None)  # longer than the one, and no longer than the next
        lengths = fmean(result.length for result in groups[number])
        # exp of the documents' average loss; and the average of their pseudo-perplexities.
        values = (len(losses), lengths, math.exp(mean), *band, fmean(map(math.exp, losses)))
        curve.append(dict(zip(COLUMNS, (*ends[number : number + 2], *values), strict=True)))
    return curve


def average_over_tokens(results: Sequence[DocumentResult]) -> dict[str, float | None]:
    """As if all documents were one: each counts as often as it has tokens, however many of them were drawn.

    The standard error is that of the positions that were not drawn; None where a document has a single one.
    """
    tokens = sum(result.tokens for result in results)
    mean = math.fsum(result.tokens * result.mean_nll for result in results) / tokens
    known = [result.tokens * error for result in results if (error := result.standard_error) is not None]
    error = math.exp(mean) * math.hypot(*known) / tokens if len(known) == len(results) else None
    return {"pseudo_perplexity": math.exp(mean), "standard_error": error, "nats_per_token": mean}


def measure(
    scorer: Scorer,
    documents: Sequence[Document],
    file: LineFile,
    *,
    batch_tokens: int,
    on_progress: Callable[[int], None],
) -> None:
    """Measures documents and adds each to the file as soon as its last position is done.

    Args:
        batch_tokens: Rows times the longest of them, at most, unless a single row is longer.
        on_progress: Called with the tokens of each batch, padding not counted.
    """
    losses_of: dict[str, list[float]] = {}
    for batch in batches(documents, batch_tokens=batch_tokens):
        found = scorer.score([Row(document.ids_s, position) for document, position in batch])
        for (document, _), loss in zip(batch, found, strict=True):
            losses = losses_of.setdefault(document.id, [])
            losses.append(loss)
            if len(losses) < len(document.positions):
                continue
            del losses_of[document.id]
            result = DocumentResult(
                id=document.id,
                length=len(document.ids_s),
                truncated=document.truncated,
                tokens=document.scorable,
                positions=len(losses),
                nll_sum=math.fsum(losses),
                nll_variance=variance(losses) if len(losses) > 1 else None,
            )
            file.add(asdict(result))
        on_progress(sum(len(document.ids_s) for document, _ in batch))


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


# Shows a bar for this many tokens of this model, and gives what is called with the tokens of each batch.
ShowProgress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured and how; the same for every model."""

    inputs: tuple[str, ...]  # files, folders, globs
    read: ReadSettings = field(default_factory=ReadSettings)
    choice: Choice
    options: LoadOptions = field(default_factory=LoadOptions)
    batch_tokens: int


def evaluate(folder: Path, output: Path, evaluation: Evaluation, show_progress: ShowProgress) -> dict[str, Any]:
    """Measures a model; writes OUTPUT/MODEL/pseudo_perplexity.json, the documents' lines beside it.

    Returns:
        The results, as the record holds them.

    Raises:
        MissingInputError, ConversionError, DataError: The model or the texts cannot be used.
        ConfigError: The model cannot read rows as long as asked for.
        OutputError: Another command is measuring this model into this output.
    """
    scorer = Scorer(folder, evaluation.options)
    max_length = evaluation.choice.max_length or scorer.max_length
    scorer.check_length(max_length)
    choice = replace(evaluation.choice, max_length=max_length)
    selection = select_documents(evaluation.inputs, scorer.tokenizer, evaluation.read, choice)
    protocol = {  # what a document's result depends on, beside the document
        "model": fingerprint(folder),
        "tokenizer": scorer.tokenizer_fingerprint,
        "max_length": max_length,
        "positions_per_document": choice.positions_per_document,
        "seed": None if choice.positions_per_document is None else choice.seed,
        "dtype": str(scorer.model.dtype).removeprefix("torch."),
        "attention": scorer.model.config._attn_implementation,
    }
    place = output / folder.resolve().name
    with hold(place / "pseudo_perplexity.lock"):
        digest = hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()[:12]
        file = LineFile(place / f"pseudo_perplexity_{digest}.jsonl")  # of another protocol, another file
        done = read_results(file)
        left = [document for document in selection.documents if document.id not in done]
        with show_progress(place.name, cost(left)) as on_progress:
            measure(scorer, left, file, batch_tokens=evaluation.batch_tokens, on_progress=on_progress)

    measured = read_results(file)
    documents = [measured[document.id] for document in selection.documents]
    results = {
        **average_over_tokens(documents),
        "documents": len(documents),
        "positions": sum(result.positions for result in documents),
        "truncated": sum(result.truncated for result in documents),
        "left_out": dict(selection.left_out),
        "curve": average_by_length(documents, choice.length_bins),
        "band": BAND,
        "documents_file": file.path.name,
    }
    settings = {
        **protocol,
        **asdict(choice),
        "data": list(map(input_label, evaluation.inputs)),
        "text_key": evaluation.read.text_key,
        "batch_tokens": evaluation.batch_tokens,
        "device": str(scorer.model.device),
        "head": "masked position" if scorer.is_sparse else "all positions",
    }
    record = place / "pseudo_perplexity.json"
    write_record(
        record, "pseudo_perplexity", folder=folder, device=scorer.model.device, settings=settings, results=results
    )
    return results


def write_curves(output: Path, results: Mapping[str, dict[str, Any]]) -> None:
    """OUTPUT/pseudo_perplexity.csv, .md and .png of all models, by their names; each is replaced as a whole."""
    rows = [{"model": name, **point} for name, found in results.items() for point in found["curve"]]
    replace_file(output / "pseudo_perplexity.csv", to_csv(["model", *COLUMNS], rows))
    write_page("pseudo_perplexity", [output / name / "pseudo_perplexity.json" for name in results], output)
