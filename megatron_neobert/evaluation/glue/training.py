"""One fine-tuning on one GLUE task by the paper's protocol on transformers' Trainer, alone or several at a time.

AdamW with betas 0.9 and 0.95, no clipping; 6 % of the steps warm up, the rate falls linearly to a tenth at 90 % of them
and stays. The model is evaluated min(500, batches // 10) steps apart, and the run ends after 15 evaluations without a
better one, whose weights are kept. Weight decay leaves out biases and norms.
Source: arXiv 2502.19587 appendix C; rates and betas are those of chandar-lab/NeoBERT glue/train.py, whose linear part
ends above the floor and then drops; here it ends at the floor.
"""

import multiprocessing
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from megatron_neobert.errors import EXIT_UNAVAILABLE, print_warnings_as_sentences, short_reason
from megatron_neobert.evaluation.encoders import LoadOptions, load_tokenizer, longest_input
from megatron_neobert.evaluation.glue.predictions import EVALUATION_BATCH, average, compute_scores, load_classifier
from megatron_neobert.evaluation.glue.tasks import TASKS, Protocol, read_split

WARMUP, DECAYED, FLOOR = 0.06, 0.9, 0.1  # shares of the steps, and of the peak
MODEL = "model"  # folder of the best weights within a run's


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
        length = longest_input(trainer.model, trainer.processing_class, at_most=run.protocol.max_length)
        rows = _shortest_first(tokenize_split(run, split, trainer.processing_class, length))
        scores["accuracy_mismatched"] = trainer.evaluate(rows, metric_key_prefix="other")["other_accuracy"]
    (Path(checkpoint) / "training_args.bin").unlink()  # a pickle, which a model folder does not need
    Path(checkpoint).rename(run.folder / MODEL)
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
    length = longest_input(model, tokenizer, at_most=protocol.max_length)
    train = tokenize_split(run, "train", tokenizer, length)

    def compute_metrics(evaluated: Any) -> dict[str, float]:
        return compute_scores(task, evaluated.predictions, evaluated.label_ids)

    trainer = GlueTrainer(
        model=model,
        args=_arguments(run, batches=-(-len(train) // point.batch_size), metric=task.metrics[0]),
        train_dataset=train,
        eval_dataset=_shortest_first(tokenize_split(run, task.validation[0], tokenizer, length)),
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
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
    rows = _read(run.data_dir, run.task, split).spread(run.protocol.limit)
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


def run_all(runs: Sequence[Run], *, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Every run with its outcome, as they finish.

    Where one fails, a warning names it and nothing new is started; what is running is finished and given before the
    error is raised. transformers' Trainer would spread one run over every GPU it sees and multiply its batch; a process
    therefore sees one.
    """
    devices = visible_gpus()
    if jobs == 1:
        _choose_gpu(devices[:1])
        for run in runs:
            yield run, fine_tune(run)
        return
    context = multiprocessing.get_context("spawn")  # CUDA and tokenizers do not survive a fork
    shares = context.Queue()
    for number in range(jobs):
        shares.put(devices[number % len(devices) :][:1] if devices else [])
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(shares,))
    try:
        yield from share_out(runs, pool, jobs)
    except BaseException:  # Ctrl-C: what is running is not waited for
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def share_out(runs: Sequence[Run], pool: Executor, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Of runs in a pool of `jobs` workers, as `run_all`."""
    waiting = iter(runs)
    going = {pool.submit(fine_tune, run): run for run in islice(waiting, jobs)}  # no queue: it could not be taken back
    failure: BaseException | None = None
    while going:
        for future in futures.wait(going, return_when=futures.FIRST_COMPLETED).done:
            run = going.pop(future)
            error = future.exception()
            if error is not None:
                others = f", and the {len(going)} that are running are waited for" if going else ""
                words = f"{run.task} {run.point.name} failed ({short_reason(error)}); no other run is started{others}."
                warnings.warn(words, stacklevel=2)
            failure = failure or error
            if failure is None:
                going |= {pool.submit(fine_tune, following): following for following in islice(waiting, 1)}
            if error is None:
                yield run, future.result()
    if failure is not None:
        raise failure


def visible_gpus() -> list[str]:
    """The names of this process's GPUs, as CUDA_VISIBLE_DEVICES takes them; does not start CUDA."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ([str(number) for number in range(count)] if named is None else named.split(","))[:count]


def _choose_gpu(devices: list[str]) -> None:
    """Before CUDA is used: which GPU."""
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[0]


def _start_worker(shares: "Queue[list[str]]") -> None:
    """Its GPU, and its end with the command: the workers of one that was killed would run beside those of the next."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers call this"

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(EXIT_UNAVAILABLE)

    print_warnings_as_sentences()
    threading.Thread(target=end_with_parent, daemon=True).start()
    _choose_gpu(shares.get())
