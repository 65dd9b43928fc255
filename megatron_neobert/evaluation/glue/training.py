"""One fine-tuning on one GLUE task, by the paper's protocol on transformers' Trainer.

AdamW with betas 0.9 and 0.95, no clipping; 6 % of the steps warm up, the rate falls linearly to a tenth at 90 % of them
and stays. The model is evaluated min(500, batches // 10) steps apart, and the run ends after 15 evaluations without a
better one, whose weights are kept. Weight decay leaves out biases and norms.
Source: arXiv 2502.19587 appendix C; rates and betas are those of chandar-lab/NeoBERT glue/train.py, whose linear part
ends above the floor and then drops; here it ends at the floor.
"""

import shutil
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from megatron_neobert.evaluation.encoders import LoadOptions, load_tokenizer
from megatron_neobert.evaluation.glue.data import read_split
from megatron_neobert.evaluation.glue.metrics import average, compute_scores
from megatron_neobert.evaluation.glue.models import load_classifier, longest_input
from megatron_neobert.evaluation.glue.tasks import TASKS, GlueTask

EVALUATION_BATCH = 32
WARMUP, DECAYED, FLOOR = 0.06, 0.9, 0.1  # shares of the steps, and of the peak
MODEL = "model"  # folder of the best weights within a run's


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What every run of an evaluation has in common."""

    epochs: int = 10
    patience: int = 15  # evaluations
    max_length: int = 1024  # tokens
    limit: int | None = None  # rows of every split
    dtype: str = "float32"  # of the forward and backward passes; weights and moments stay float32
    attention: str | None = None
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Point:
    """Of the grid, with the seed of head, order and dropout."""

    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int

    @property
    def name(self) -> str:
        return f"batch{self.batch_size}_lr{self.learning_rate:g}_wd{self.weight_decay:g}_seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One point on one task; can go to another process."""

    task: str
    point: Point
    start: Path  # folder that the weights are from
    data_dir: Path
    folder: Path  # to create
    protocol: Protocol


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
    task = TASKS[run.task]
    trainer = build_trainer(run)
    trainer.train()
    best_step, checkpoint = trainer.state.best_global_step, trainer.state.best_model_checkpoint
    assert best_step is not None and checkpoint is not None, "the first evaluation is better than none"
    best = next(entry for entry in trainer.state.log_history if entry["step"] == best_step)
    scores = {name: best[f"eval_{name}"] for name in task.metrics if f"eval_{name}" in best}
    for split in task.validation[1:]:  # MNLI's other one, which chooses nothing
        rows = _shortest_first(tokenize_split(run, split, trainer.processing_class, _length(trainer, run)))
        scores["accuracy_mismatched"] = trainer.evaluate(rows, metric_key_prefix="other")["other_accuracy"]
    _keep_best(Path(checkpoint), run.folder)
    return Outcome(
        scores=scores,
        average=average(task, scores),
        best_step=best_step,
        steps=trainer.state.global_step,
        seconds=time.monotonic() - started,
    )


def build_trainer(run: Run) -> "GlueTrainer":
    """Everything that a run needs, before its first step."""
    task, protocol, point = TASKS[run.task], run.protocol, run.point
    transformers.set_seed(point.seed)  # of the head
    options = LoadOptions(device=protocol.device, attention=protocol.attention)
    model, tokenizer = load_classifier(run.start, task, options), load_tokenizer(run.start)
    length = longest_input(model, tokenizer, protocol.max_length)
    train = tokenize_split(run, "train", tokenizer, length)
    trainer = GlueTrainer(
        model=model,
        args=_arguments(run, batches=-(-len(train) // point.batch_size), metric=task.metrics[0]),
        train_dataset=train,
        eval_dataset=_shortest_first(tokenize_split(run, task.validation[0], tokenizer, length)),
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=partial(_compute_metrics, task),
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=protocol.patience)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    assert trainer.args.n_gpu <= 1, f"{trainer.args.n_gpu} GPUs would multiply the batch"
    return trainer


class GlueTrainer(transformers.Trainer):
    """With the paper's learning rates."""

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
    """Steps between two evaluations, from the batches of an epoch."""
    return max(1, min(500, batches // 10))


def tokenize_split(run: Run, split: str, tokenizer: Any, length: int) -> Dataset:
    """One split of the run's task, as the model takes it."""
    return _tokenize(run.data_dir, TASKS[run.task], split, run.protocol.limit, tokenizer, length)


def _tokenize(data_dir: Path, task: GlueTask, split: str, limit: int | None, tokenizer: Any, length: int) -> Dataset:
    rows = _read(data_dir, task.name, split).spread(limit)
    encoded = tokenizer(*(list(column) for column in zip(*rows.texts, strict=True)), truncation=True, max_length=length)
    return Dataset.from_dict({**encoded, "labels": rows.labels})


def _shortest_first(rows: Dataset) -> Dataset:
    """The same rows in an order that needs little padding; no score depends on it."""
    lengths = list(map(len, rows["input_ids"]))
    return rows.select(sorted(range(len(lengths)), key=lengths.__getitem__))


@lru_cache(maxsize=4)  # the runs of one process use the same few
def _read(data_dir: Path, task: str, split: str) -> Any:
    return read_split(data_dir, TASKS[task], split)


def _arguments(run: Run, *, batches: int, metric: str) -> transformers.TrainingArguments:
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
        eval_strategy="steps",
        eval_steps=evaluation_interval(batches),
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


def _compute_metrics(task: GlueTask, evaluated: Any) -> dict[str, float]:
    return compute_scores(task, evaluated.predictions, evaluated.label_ids)


def _length(trainer: GlueTrainer, run: Run) -> int:
    return longest_input(trainer.model, trainer.processing_class, run.protocol.max_length)


def _keep_best(checkpoint: Path, folder: Path) -> None:
    (checkpoint / "training_args.bin").unlink()  # a pickle, which a model folder does not need
    checkpoint.rename(folder / MODEL)
