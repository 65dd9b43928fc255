"""One fine-tuning by the paper's protocol on transformers' Trainer.

AdamW with betas 0.9 and 0.95, no clipping; 6 % of the steps warm up, the rate falls linearly to a tenth at 90 % of them
and stays. The model is evaluated min(500, batches // 10) steps apart, and the run ends after 15 evaluations without a
better one, whose weights are kept. Weight decay leaves out biases and norms.
Source: arXiv 2502.19587 appendix C; rates and betas are those of chandar-lab/NeoBERT glue/train.py, whose linear part
ends above the floor and then drops; here it ends at the floor.
"""

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from megatron_neobert.evaluation.fine_tuning.settings import Point, Protocol

WARMUP, DECAYED, FLOOR = 0.06, 0.9, 0.1  # shares of the steps, and of the peak
EVALUATION_BATCH = 32  # rows; no score depends on it
MODEL = "model"  # folder of the best weights within a run's


@dataclass(frozen=True, kw_only=True)
class Run(ABC):
    """One point on one task; can go to another process."""

    task: str
    point: Point
    start: Path  # folder that the weights are from
    data_dir: Path
    folder: Path  # to create
    protocol: Protocol

    @abstractmethod
    def build_trainer(self) -> "PaperTrainer":
        """Everything that the run needs, before its first step."""

    @abstractmethod
    def collect_scores(self, trainer: "PaperTrainer", best: dict[str, float]) -> dict[str, float]:
        """The scores of the weights that are kept, which the trainer holds; `best`: of their evaluation, by name."""

    @abstractmethod
    def average(self, scores: dict[str, float]) -> float:
        """The run's number in the table."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of the evaluation that won, fractions of 1."""

    scores: dict[str, float]
    average: float
    best_step: int
    steps: int  # until the run ended
    seconds: float


def fine_tune(run: Run) -> Outcome:
    """Trains, and leaves the best weights with their tokenizer in `run.folder / MODEL`."""
    started = time.monotonic()
    shutil.rmtree(run.folder, ignore_errors=True)  # of a run that was killed
    trainer = run.build_trainer()
    trainer.train()
    best_step, checkpoint = trainer.state.best_global_step, trainer.state.best_model_checkpoint
    assert best_step is not None and checkpoint is not None, "the first evaluation is better than none"
    best = next(entry for entry in trainer.state.log_history if entry["step"] == best_step)
    of_evaluation = {name.removeprefix("eval_"): value for name, value in best.items() if name.startswith("eval_")}
    scores = run.collect_scores(trainer, of_evaluation)
    (Path(checkpoint) / "training_args.bin").unlink()  # a pickle, which a model folder does not need
    Path(checkpoint).rename(run.folder / MODEL)
    return Outcome(
        scores=scores,
        average=run.average(scores),
        best_step=best_step,
        steps=trainer.state.global_step,
        seconds=time.monotonic() - started,
    )


class PaperTrainer(transformers.Trainer):
    """With the paper's optimizer, learning rates, evaluations and early stop.

    Args:
        collator: Makes batches of rows.
        metric: Of the `compute` metrics, the one that chooses the weights.
        eval_strategy: "steps" evaluates as the paper does, "epoch" at the end of each epoch.
        more: Further arguments of transformers.Trainer.
    """

    def __init__(
        self,
        run: Run,
        model: Any,
        tokenizer: Any,
        *,
        train: Dataset,
        validation: Dataset,
        collator: Any,
        metric: str,
        compute: Callable[[Any], dict[str, float]],
        eval_strategy: str = "steps",
        **more: Any,
    ) -> None:
        interval = evaluation_interval(-(-len(train) // run.point.batch_size))
        super().__init__(
            model=model,
            args=_arguments(run, eval_strategy=eval_strategy, interval=interval, metric=metric),
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            data_collator=collator,
            compute_metrics=compute,
            callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=run.protocol.patience)],
            **more,
        )
        self.remove_callback(transformers.PrinterCallback)
        assert self.args.n_gpu <= 1, f"{self.args.n_gpu} GPUs would multiply the batch"

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """The rate of every step, as a factor of the peak."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            assert optimizer is not None, "Trainer has created it before"
            self.lr_scheduler = LambdaLR(optimizer, partial(rate_factor, total=num_training_steps))
        return self.lr_scheduler


def rate_factor(step: int, *, total: int) -> float:
    """Of the peak, at a step counted from 0."""
    warmup, decayed = round(WARMUP * total), round(DECAYED * total)
    if step < warmup:
        return step / warmup
    if step >= decayed:
        return FLOOR
    return 1 - (1 - FLOOR) * (step - warmup) / (decayed - warmup)


def evaluation_interval(batches: int) -> int:
    """Return the steps between two evaluations, from the batches of an epoch."""
    return max(1, min(500, batches // 10))


def shortest_first(rows: Dataset) -> Dataset:
    """The same rows in an order that needs little padding; no score depends on it."""
    lengths = list(map(len, rows["input_ids"]))
    return rows.select(sorted(range(len(lengths)), key=lengths.__getitem__))


def _arguments(run: Run, *, eval_strategy: str, interval: int, metric: str) -> transformers.TrainingArguments:
    protocol, point = run.protocol, run.point
    on_cpu = torch.device(protocol.device).type == "cpu"
    return transformers.TrainingArguments(
        output_dir=str(run.folder),
        num_train_epochs=protocol.epochs,
        per_device_train_batch_size=point.batch_size,
        per_device_eval_batch_size=EVALUATION_BATCH,
        learning_rate=point.learning_rate,
        weight_decay=point.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=0.0,
        seed=point.seed,
        eval_strategy=eval_strategy,
        eval_steps=interval,
        save_strategy="best",
        save_total_limit=1,
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        greater_is_better=True,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=protocol.dtype == "bfloat16",
        fp16=protocol.dtype == "float16",
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
    )
