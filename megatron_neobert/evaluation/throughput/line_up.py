"""Loads the models of a measurement and says which of the combinations asked for cannot be measured, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.throughput.models import (
    FORWARD,
    TRAINING,
    Contender,
    Subject,
    load_subject,
    why_not,
)


@dataclass(frozen=True)
class LineUp:
    """Who takes part, and who does not: model, contender in words, reason."""

    contenders: dict[Contender, Subject]
    not_run: list[dict[str, str]]


def line_up(
    folders: Mapping[str, Path],
    *,
    dtypes: Sequence[str],
    attentions: Sequence[str | None],
    layouts: Sequence[str],
    backward: bool,
    lengths: Sequence[int],
    device: torch.device,
) -> LineUp:
    """Every model in every dtype, attention and layout.

    Args:
        folders: Name -> Hugging Face folder.

    Raises:
        MissingInputError, ConversionError: A model cannot be loaded as asked.
        ConfigError: Nothing is left to measure.
    """
    found = LineUp({}, [])
    for name, folder in folders.items():
        for dtype in dict.fromkeys(dtypes):
            for attention in dict.fromkeys(attentions):
                subject = load_subject(folder, name, dtype=dtype, attention=attention, device=device, backward=backward)
                _enter(found, subject, layouts, backward=backward, lengths=lengths)
    if not found.contenders:
        reasons = "; ".join(f"{entry['contender']}: {entry['reason']}" for entry in found.not_run)
        raise ConfigError(f"nothing can be measured ({reasons}); ask for another layout, dtype or length.")
    return found


def _enter(found: LineUp, subject: Subject, layouts: Sequence[str], *, backward: bool, lengths: Sequence[int]) -> None:
    longest = subject.longest
    for length in lengths if longest is not None else ():
        if length > longest:  # type: ignore[operator]
            reason = f"has learned positions for {longest:,} tokens only"
            found.not_run.append({"model": subject.name, "contender": f"{subject.name}, {length:,}", "reason": reason})
    for layout in layouts:
        what = f"{subject.name}, {subject.dtype}, {subject.attention}, {layout}"
        if reason_against := why_not(subject, layout):
            found.not_run.append({"model": subject.name, "contender": what, "reason": reason_against})
            continue
        if longest is not None and longest < min(lengths):
            continue  # said above
        for passes in (FORWARD, TRAINING) if backward else (FORWARD,):
            contender = Contender(
                model=subject.name,
                dtype=subject.dtype,
                attention=subject.attention,
                layout=layout,
                passes=passes,
            )
            found.contenders[contender] = subject
