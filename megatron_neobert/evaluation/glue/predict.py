"""Answers for the GLUE server: one TSV per test set, from the best weights of each task.

File names, header and words are those of the server's sample submission. The diagnostic set is answered by the best
MNLI model where the data has it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_neobert.errors import MissingInputError
from megatron_neobert.evaluation.encoders import LoadOptions, load_tokenizer
from megatron_neobert.evaluation.glue.data import GlueSplit, check_rows, find_task, read_split
from megatron_neobert.evaluation.glue.metrics import to_predictions
from megatron_neobert.evaluation.glue.models import load_classifier, longest_input
from megatron_neobert.evaluation.glue.tasks import DIAGNOSTIC, TASKS, GlueTask
from megatron_neobert.evaluation.glue.training import EVALUATION_BATCH, Protocol
from megatron_neobert.runtime.atomic_files import replace_file

_FILE_NAMES = {"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"}


def write_submission(name: str, weights: Path, data_dir: Path, output: Path, protocol: Protocol) -> list[Path]:
    """The files of one task, and with MNLI those of the diagnostic set.

    Raises:
        MissingInputError, DataError: As `read_test_sets`.
    """
    task = TASKS[name]
    options = LoadOptions(device=protocol.device, attention=protocol.attention)
    model, tokenizer = load_classifier(weights, task, options), load_tokenizer(weights)
    length = longest_input(model, tokenizer, protocol.max_length)
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for asked, split, rows in read_test_sets(name, data_dir):
        answers = to_answers(asked, predict(model, tokenizer, rows, length))
        written.append(output / _FILE_NAMES.get(split, f"{asked.title}.tsv"))
        lines = ["index\tprediction", *(f"{number}\t{answer}" for number, answer in enumerate(answers))]
        replace_file(written[-1], "\n".join(lines) + "\n")
    return written


def read_test_sets(name: str, data_dir: Path) -> Iterator[tuple[GlueTask, str, GlueSplit]]:
    """What the server asks about a task, with MNLI the diagnostic set too; warns where rows are missing.

    Raises:
        MissingInputError, DataError: A test set is not there, or cannot be answered row by row.
    """
    task = TASKS[name]
    wanted = [(task, split) for split in task.rows if split.startswith("test")]
    if name == "mnli" and _has(data_dir, DIAGNOSTIC):
        wanted.append((DIAGNOSTIC, "test"))
    for asked, split in wanted:
        rows = read_split(data_dir, asked, split, labelled=False)
        check_rows(asked, split, len(rows.texts))
        yield asked, split, rows


@torch.no_grad()
def predict(model: Any, tokenizer: Any, rows: GlueSplit, length: int) -> NDArray[np.floating]:
    """Logits [rows, outputs] of every row."""
    parts = []
    for start in range(0, len(rows.texts), EVALUATION_BATCH):
        columns = zip(*rows.texts[start : start + EVALUATION_BATCH], strict=True)
        batch = tokenizer(
            *(list(column) for column in columns), truncation=True, max_length=length, padding=True, return_tensors="pt"
        )
        parts.append(model(**batch.to(model.device)).logits.float().cpu().numpy())
    return np.concatenate(parts)


def to_answers(task: GlueTask, logits: NDArray[np.floating]) -> list[str]:
    """The server's word for every row; scores with three digits, within 0 and 5."""
    predictions = to_predictions(task, logits)
    if task.is_regression:
        return [f"{score:.3f}" for score in np.clip(predictions.astype(float), 0.0, 5.0)]
    return [task.labels[int(number)] for number in predictions]


def _has(data_dir: Path, task: GlueTask) -> bool:
    try:
        find_task(data_dir, task)
    except MissingInputError:
        return False
    return True
