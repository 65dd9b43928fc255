"""One fine-tuning on one GLUE task."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset

from megatron_neobert.evaluation.encoders import LoadOptions, load_tokenizer, longest_input
from megatron_neobert.evaluation.fine_tuning.trainer import PaperTrainer, Run, shortest_first
from megatron_neobert.evaluation.glue.predictions import average, compute_scores, load_classifier
from megatron_neobert.evaluation.glue.tasks import TASKS, read_split


@dataclass(frozen=True, kw_only=True)
class GlueRun(Run):
    """One point on one of GLUE's tasks."""

    def build_trainer(self) -> PaperTrainer:
        """Its head is drawn from the point's seed."""
        task, protocol = TASKS[self.task], self.protocol
        transformers.set_seed(self.point.seed)  # of the head
        options = LoadOptions(device=protocol.device, attention=protocol.attention)
        model, tokenizer = load_classifier(self.start, task, options), load_tokenizer(self.start)
        length = longest_input(model, tokenizer, at_most=protocol.max_length)

        def compute_metrics(evaluated: Any) -> dict[str, float]:
            return compute_scores(task, evaluated.predictions, evaluated.label_ids)

        return PaperTrainer(
            self,
            model,
            tokenizer,
            train=tokenize_split(self, "train", tokenizer, length),
            validation=shortest_first(tokenize_split(self, task.validation[0], tokenizer, length)),
            collator=transformers.DataCollatorWithPadding(tokenizer),
            metric=task.metrics[0],
            compute=compute_metrics,
        )

    def collect_scores(self, trainer: PaperTrainer, best: dict[str, float]) -> dict[str, float]:
        """The task's metrics."""
        task = TASKS[self.task]
        scores = {name: best[name] for name in task.metrics if name in best}
        for split in task.validation[1:]:  # MNLI's other one, which chooses nothing
            length = longest_input(trainer.model, trainer.processing_class, at_most=self.protocol.max_length)
            rows = shortest_first(tokenize_split(self, split, trainer.processing_class, length))
            found: Any = trainer.predict(rows)
            scores["accuracy_mismatched"] = compute_scores(task, found.predictions, found.label_ids)["accuracy"]
        return scores

    def average(self, scores: dict[str, float]) -> float:
        """The mean of the task's metrics."""
        return average(TASKS[self.task], scores)


def tokenize_split(run: Run, split: str, tokenizer: Any, length: int) -> Dataset:
    """One split of the run's task, as the model takes it."""
    rows = _read(run.data_dir, run.task, split).spread(run.protocol.limit)
    encoded = tokenizer(*(list(column) for column in zip(*rows.texts, strict=True)), truncation=True, max_length=length)
    return Dataset.from_dict({**encoded, "labels": rows.labels})


@lru_cache(maxsize=4)  # the runs of one process use the same few
def _read(data_dir: Path, task: str, split: str) -> Any:
    return read_split(data_dir, TASKS[task], split)
