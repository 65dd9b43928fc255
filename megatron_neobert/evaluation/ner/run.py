"""Named-entity recognition of one model: the points of a grid on every data set, the best of them, and its tags.

GLUE's protocol, but with one evaluation an epoch. The validation set chooses step and point; each run looks at the test
set, where there is one, once, with its best weights. OUTPUT/NAME/ner/DATA_SET holds the runs, the best weights and what
these find in the text, a word, its tag and the tag found on a line; OUTPUT/NAME/ner.json and .md hold the results. The
same command resumes after a kill.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers

from megatron_neobert.errors import MissingInputError
from megatron_neobert.evaluation.encoders import LoadOptions, fingerprint, load_tokenizer, longest_input
from megatron_neobert.evaluation.fine_tuning.settings import Grid
from megatron_neobert.evaluation.fine_tuning.study import (
    BEST,
    FineTuning,
    Progress,
    read_results,
    save_result,
    summarise,
)
from megatron_neobert.evaluation.fine_tuning.trainer import PaperTrainer, Run
from megatron_neobert.evaluation.ner.data import SPLITS, Sentence, labels_of, read_split, spread
from megatron_neobert.evaluation.ner.tagging import METRICS, load_tagger, predict, score_kinds, to_rows
from megatron_neobert.evaluation.records import hold, write_record
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.runtime.atomic_files import replace_file


@dataclass(frozen=True, kw_only=True)
class NerRun(Run):
    """One point on one data set."""

    def build_trainer(self) -> PaperTrainer:
        """Its head is drawn from the point's seed."""
        splits, protocol = _read(self.data_dir, self.task, self.protocol.limit), self.protocol
        labels = _labels_of(splits)
        transformers.set_seed(self.point.seed)  # of the head
        options = LoadOptions(device=protocol.device, attention=protocol.attention)
        model, tokenizer = load_tagger(self.start, labels, options), load_tokenizer(self.start)
        length = longest_input(model, tokenizer, at_most=protocol.max_length)
        validation = to_rows(splits["validation"], labels, tokenizer, length)
        return PaperTrainer(
            self,
            model,
            tokenizer,
            train=to_rows(splits["train"], labels, tokenizer, length).rows,
            validation=validation.rows,
            collator=transformers.DataCollatorForTokenClassification(tokenizer),
            metric="f1",
            eval_strategy="epoch",  # F1 is 0 until the first entity is found; the patience of small sets would end
            compute=lambda evaluated: validation.score(evaluated.predictions),
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )

    def collect_scores(self, trainer: PaperTrainer, best: dict[str, float]) -> dict[str, float]:
        """Those of the validation set by name, and those of a test set as test_NAME."""
        scores = {name: best[name] for name in METRICS}
        splits = _read(self.data_dir, self.task, self.protocol.limit)
        if "test" in splits:
            length = longest_input(trainer.model, trainer.processing_class, at_most=self.protocol.max_length)
            test = to_rows(splits["test"], _labels_of(splits), trainer.processing_class, length)
            trainer.compute_metrics = None  # which knows the validation set alone
            found: Any = trainer.predict(test.rows)
            scores |= {f"test_{name}": value for name, value in test.score(found.predictions).items()}
        return scores

    def average(self, scores: dict[str, float]) -> float:
        """F1 on the validation set."""
        return scores["f1"]


@dataclass(frozen=True, kw_only=True)
class NerEvaluation(FineTuning):
    """What is asked for."""

    kind, run = "ner", NerRun
    tasks: Sequence[str]  # data sets, as folders of data_dir
    grid: Grid


def evaluate(evaluation: NerEvaluation, on_progress: Progress) -> None:
    """Runs what has not been run, and writes the results after every data set, with those of earlier commands.

    Raises:
        MissingInputError, DataError, ConversionError: Of model or data, before anything is run.
        OutputError: The output is of other settings, or another command is writing it.
    """
    splits = {task: _read(evaluation.data_dir, task, evaluation.protocol.limit) for task in evaluation.tasks}
    load_tagger(evaluation.model, ["O"], LoadOptions(attention=evaluation.protocol.attention))
    load_tokenizer(evaluation.model)
    model = fingerprint(evaluation.model)
    for task in evaluation.tasks:
        folder = evaluation.task_folder(task)
        with hold(folder / "lock"):
            _evaluate_task(evaluation, task, splits[task], model, on_progress)
        found = {path.name: path for path in sorted((evaluation.folder / "ner").iterdir())}
        results, settings = read_results(found, fingerprint=model)
        record = evaluation.folder / "ner.json"
        write_record(
            record,
            "ner",
            folder=evaluation.model,
            settings=settings,
            results={"tasks": results},
            device=evaluation.protocol.device,
        )
        write_page("ner", [record], evaluation.folder)


def _evaluate_task(
    evaluation: NerEvaluation, task: str, splits: dict[str, list[Sentence]], model: str, on_progress: Progress
) -> None:
    rows = {split: len(sentences) for split, sentences in splits.items()}
    study, outcomes, settings = evaluation.run_task(
        task, evaluation.grid, start=evaluation.model, rows=rows, on_progress=on_progress
    )
    metrics = [f"{split}{name}" for split in ("", "test_")[: len(splits) - 1] for name in METRICS]
    result = summarise(outcomes, metrics, kept=study.kept) | {"kinds": _write_tags(evaluation, study.folder, splits)}
    save_result(study.folder, result, model=model, settings=settings)


def _write_tags(evaluation: NerEvaluation, folder: Path, splits: dict[str, list[Sentence]]) -> dict[str, Any]:
    """What the best weights find in validation and test set, as files; their scores by kind of entity.

    Raises:
        MissingInputError: Somebody has removed the weights.
    """
    if not (folder / BEST).is_dir():
        raise MissingInputError(f"{folder / BEST}: the best weights are gone; remove {folder} to run it again.")
    protocol = evaluation.protocol
    labels = _labels_of(splits)
    options = LoadOptions(device=protocol.device, attention=protocol.attention)
    model, tokenizer = load_tagger(folder / BEST, labels, options), load_tokenizer(folder / BEST)
    length = longest_input(model, tokenizer, at_most=protocol.max_length)
    kinds = {}
    for split in [split for split in SPLITS if split in splits and split != "train"]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about long sentences, which the runs have given
            tagged = to_rows(splits[split], labels, tokenizer, length)
        found = predict(model, tokenizer, tagged)
        lines = [
            "".join("\t".join(line) + "\n" for line in zip(*sentence, tags, strict=True))
            for sentence, tags in zip(tagged.sentences, found, strict=True)
        ]
        replace_file(folder / f"{split}.tsv", "\n".join(lines))
        kinds[split] = score_kinds([sentence.tags for sentence in tagged.sentences], found)
    return kinds


def _labels_of(splits: dict[str, list[Sentence]]) -> list[str]:
    return labels_of(sentence for sentences in splits.values() for sentence in sentences)


@lru_cache(maxsize=4)  # the runs of one process use the same few
def _read(data_dir: Path, task: str, limit: int | None) -> dict[str, list[Sentence]]:
    """By split; the test set only where there is one."""
    splits = {split: read_split(data_dir, task, split) for split in SPLITS[:2]}
    with suppress(MissingInputError):
        splits["test"] = read_split(data_dir, task, "test")
    return {split: spread(sentences, limit) for split, sentences in splits.items()}
