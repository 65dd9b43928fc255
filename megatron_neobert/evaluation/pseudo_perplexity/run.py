"""Pseudo-perplexity, exp(-1/N sum log p(x_i | x without i)): how sure a model is of each token given all the others.

Tokens that the tokenizer adds are neither masked nor counted. Costs as many forwards as tokens are masked, so a text of
4,096 tokens costs 4,096 of them unless positions are drawn. This module takes one model from its folder to its record,
and the curves of several into one table and figure.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_neobert.data.shards.find import shard_label
from megatron_neobert.data.shards.records import ReadSettings
from megatron_neobert.evaluation.encoders import LoadOptions
from megatron_neobert.evaluation.plots import Curve, plot_curves
from megatron_neobert.evaluation.pseudo_perplexity.documents import Choice, select_documents
from megatron_neobert.evaluation.pseudo_perplexity.measure import cost, measure, missing_in, name_of, protocol_of
from megatron_neobert.evaluation.pseudo_perplexity.results import (
    BAND,
    Bin,
    ResultFile,
    average_by_length,
    average_over_tokens,
    write_table,
)
from megatron_neobert.evaluation.pseudo_perplexity.scorer import Scorer
from megatron_neobert.evaluation.records import hold, write_record

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


@dataclass(frozen=True)
class Outcome:
    """Of one model."""

    name: str
    documents: int
    pseudo_perplexity: float  # of all tokens together
    standard_error: float | None  # of the drawing; None where single positions were drawn
    curve: list[Bin]


def evaluate(folder: Path, output: Path, evaluation: Evaluation, show_progress: ShowProgress) -> Outcome:
    """Measures a model and writes OUTPUT/MODEL/pseudo_perplexity.json, the documents' lines beside it.

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

    name, protocol = folder.resolve().name, protocol_of(scorer, choice)
    place = output / name
    with hold(place / "pseudo_perplexity.lock"):
        file = ResultFile(place / f"pseudo_perplexity_{name_of(protocol)}.jsonl")
        with show_progress(name, cost(missing_in(file, selection.documents))) as on_progress:
            measure(scorer, selection.documents, file, batch_tokens=evaluation.batch_tokens, on_progress=on_progress)

    results = [file.results[document.id] for document in selection.documents]
    curve, overall = average_by_length(results, choice.length_bins), average_over_tokens(results)
    write_record(
        place / "pseudo_perplexity.json",
        "pseudo_perplexity",
        folder=folder,
        device=scorer.model.device,
        settings={
            **protocol,
            **asdict(choice),
            "data": list(map(shard_label, evaluation.inputs)),
            "text_key": evaluation.read.text_key,
            "batch_tokens": evaluation.batch_tokens,
            "device": str(scorer.model.device),
            "head": "masked position" if scorer.is_sparse else "all positions",
        },
        results={
            **asdict(overall),
            "documents": len(results),
            "positions": sum(result.positions for result in results),
            "truncated": sum(result.truncated for result in results),
            "left_out": dict(selection.left_out),
            "curve": list(map(asdict, curve)),
            "band": BAND,
            "documents_file": file.path.name,
        },
    )
    return Outcome(name, len(results), overall.pseudo_perplexity, overall.standard_error, curve)


def write_curves(output: Path, outcomes: list[Outcome]) -> None:
    """OUTPUT/pseudo_perplexity.csv and .png, replaced as a whole."""
    write_table(output / "pseudo_perplexity.csv", {outcome.name: outcome.curve for outcome in outcomes})
    plot_curves(
        output / "pseudo_perplexity.png",
        [_to_curve(outcome) for outcome in outcomes],
        x_label="tokens (average of the documents of a bin)",
        y_label="pseudo-perplexity",
        title=f"Pseudo-perplexity by length; band: {BAND}",
        log_x=True,
        log_y=True,
    )


def _to_curve(outcome: Outcome) -> Curve:
    points = outcome.curve
    nan = float("nan")
    return Curve(
        outcome.name,
        [round(point.mean_length) for point in points],
        [point.pseudo_perplexity for point in points],
        [nan if point.low is None else point.low for point in points],
        [nan if point.high is None else point.high for point in points],
    )
