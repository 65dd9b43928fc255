"""The story of a run: read a batch, train on it, say so, validate, save, stop."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_neobert.checkpoint.folder import check_folders, claim
from megatron_neobert.checkpoint.load import load_checkpoint
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.dali import DaliLoader
from megatron_neobert.data.batches.loader import build_loader
from megatron_neobert.data.batches.stream import StepBatches
from megatron_neobert.errors import EXIT_INTERRUPTED, EXIT_STOPPED_EARLY, DivergenceError
from megatron_neobert.model.flops import count_parameters
from megatron_neobert.model.kernels import choose_kernels
from megatron_neobert.runtime import distributed
from megatron_neobert.runtime.environment import is_rank_zero
from megatron_neobert.runtime.signals import reason_to_stop, requests_of_this_rank
from megatron_neobert.state import Progress, Run
from megatron_neobert.training.hang_detector import Watchdog
from megatron_neobert.training.metrics import Averages, Monitor
from megatron_neobert.training.setup import build_run, join
from megatron_neobert.training.skip_update import count_update, too_many_skips
from megatron_neobert.training.step import train_step, validation_step
from megatron_neobert.training.trackers_wandb import refuse_missing_wandb


def run_training(settings: Settings) -> int:
    """Builds a run, continues it from --load if there is something to continue, and trains.

    Returns:
        The exit code, see `train`.

    Collective: all ranks.
    """
    refuse_missing_wandb(settings)
    check_folders(settings.checkpoint)
    with claim(settings.checkpoint.save if is_rank_zero() else None):
        return _run(settings)


def _run(settings: Settings) -> int:
    inputs, device = join(settings)
    with Watchdog(settings.parallel) as watchdog:
        run = build_run(settings, inputs, device)
        run.tick = watchdog.tick
        loaded = load_checkpoint(run)
        monitor = Monitor(
            settings, iteration=run.progress.iteration, vocab_size=run.tokenizer.vocab_size, device=device
        )
        monitor.say(_opening_line(run, loaded))
        monitor.say(choose_kernels(settings).summary)
        with monitor.running():
            code = train(run, monitor, watchdog)
    distributed.shut_down()
    return code


def train(run: Run, monitor: Monitor, watchdog: Watchdog) -> int:
    """Trains from `run.progress` to the last iteration, or until somebody wants the run to stop.

    Returns:
        The exit code: 0 at the end of training, 75 if the run can go on later, 130 if it was stopped unsaved.

    Raises:
        DivergenceError: Too many updates in a row were skipped; what there is has been saved. Or the replicas of the
            model no longer hold the same weights.

    Collective: all ranks.
    """
    training, saver = run.settings.training, Saver(run, say=monitor.say)
    reason, _ = _agree(run, saver, monitor, has_trained=False)  # to stop: it may have come while the run was built
    if reason is None and _validation_is_due(run):  # the run was stopped before or during it
        reason = _validate(run, monitor, saver, watchdog)
    if reason is not None:
        return _stop(run, monitor, reason)
    if run.progress.iteration >= training.train_iters:
        monitor.say(f"nothing to do: iteration {run.progress.iteration} of {training.train_iters} is saved already")
        return 0
    watchdog.mark("waiting for data", run.progress.iteration + 1)
    for batches in monitor.clocked(_training_batches(run)):
        watchdog.mark("training", run.progress.iteration + 1)
        learning_rate = run.optimizer.param_groups[0]["lr"]
        report = train_step(run, batches)
        run.progress = count_update(_advance(run, batches), report, training)
        monitor.add(report, run.progress)
        iteration = run.progress.iteration
        if _due(iteration, run.settings.parallel.check_weight_hash_across_dp_replicas_interval):
            saver.refuse_drift()
        reason, save_is_wanted = _agree(run, saver, monitor)
        if reason is None and iteration < training.train_iters and _due(iteration, training.exit_interval):
            reason = f"--exit-interval {training.exit_interval}"
        trouble = too_many_skips(run.progress, training, save=run.settings.checkpoint.save)
        last = iteration == training.train_iters or reason is not None or trouble is not None
        validates = not (reason or trouble) and _validation_is_due(run)
        saves = last or save_is_wanted or _due(iteration, run.settings.checkpoint.save_interval)
        if saves or validates or _due(iteration, run.settings.logging.log_interval):
            run.progress = monitor.close_interval(run.progress, lr=learning_rate, grad_norm=report.grad_norm)
        if validates:
            reason = _validate(run, monitor, saver, watchdog)
            last = last or reason is not None
        if (saves or last) and run.settings.checkpoint.save is not None:
            watchdog.mark("saving", iteration)
            saver.save()
        if last:
            break
        if saves or validates:
            monitor.restart_clock()
        watchdog.mark("waiting for data", iteration + 1)
    saver.finish()
    if trouble is not None:
        raise DivergenceError(trouble)
    return 0 if reason is None else _stop(run, monitor, reason)


def _validate(run: Run, monitor: Monitor, saver: Saver, watchdog: Watchdog) -> str | None:
    """Says the loss over the first `eval_iters` batches of the held-out documents, the same ones at every call.

    Returns:
        Why the run shall stop, if somebody asks for that meanwhile. Nothing is said then; the validation is due again
        when the run goes on.

    Collective: all ranks.
    """
    assert run.validation_stream is not None
    sums: torch.Tensor | None = None
    reason: str | None = None
    for model in run.models:
        model.eval()
    for _, batches in zip(range(run.settings.training.eval_iters), run.validation_stream.steps(), strict=False):
        watchdog.mark("validating", run.progress.iteration)
        report = validation_step(run, batches)
        sums = report.sums if sums is None else sums + report.sums
        reason, _ = _agree(run, saver, monitor)
        if reason is not None:
            break
    for model in run.models:
        model.train()
    if reason is None:
        assert sums is not None
        run.progress = replace(run.progress, validated_iteration=run.progress.iteration)
        monitor.report_validation(run.progress, Averages.of(sums))
    return reason


def _validation_is_due(run: Run) -> bool:
    iteration, training = run.progress.iteration, run.settings.training
    return (
        run.validation_stream is not None
        and iteration > run.progress.validated_iteration
        and (iteration == training.train_iters or _due(iteration, training.eval_interval))
    )


def _agree(run: Run, saver: Saver, monitor: Monitor, *, has_trained: bool = True) -> tuple[str | None, bool]:
    """Why all ranks stop after this iteration, None to go on; and whether somebody wants a checkpoint now.

    Completes a checkpoint that all ranks have written in the background, and lets the monitor know how much memory the
    fullest rank has taken. Collective: all ranks.
    """
    requests = requests_of_this_rank(run.settings, has_trained=has_trained)
    code, save_is_wanted, writing, monitor.largest_memory_mib = distributed.largest_over_all_ranks(
        [*requests, saver.is_writing, monitor.own_memory_mib()], run.device
    )
    if not writing:
        saver.finish()
    reason = reason_to_stop(run.settings.training, iteration=run.progress.iteration, agreed_code=code)
    return reason, bool(save_is_wanted)


def _stop(run: Run, monitor: Monitor, reason: str) -> int:
    is_saved = run.settings.checkpoint.save is not None
    saved = "" if is_saved else "; nothing was saved, there is no --save"
    monitor.say(
        f"stopped after iteration {run.progress.iteration} of {run.settings.training.train_iters}: {reason}{saved}"
    )
    return EXIT_STOPPED_EARLY if is_saved else EXIT_INTERRUPTED


def _training_batches(run: Run) -> Iterable[StepBatches]:
    stream, data = replace(run.training_stream, cursor=run.progress.cursor), run.settings.data
    if data.dataloader_type == "dali":
        return DaliLoader(stream, num_workers=data.num_workers, device=run.device)
    return build_loader(stream, num_workers=data.num_workers)


def _opening_line(run: Run, loaded: Path | None) -> str:
    settings = run.settings
    parameters = count_parameters(settings.model, vocab_size=run.tokenizer.vocab_size).total
    start = f"from {loaded}" if loaded else f"from fresh weights of seed {settings.training.seed}"
    return (
        f"training {parameters:,} parameters {start} on {torch.distributed.get_world_size()} x {run.device.type}, "
        f"{settings.tokens_per_iteration:,} tokens per iteration"
    )


def _advance(run: Run, batches: StepBatches) -> Progress:
    return replace(
        run.progress,
        iteration=run.progress.iteration + 1,
        cursor=batches.cursor_after,
        consumed_samples=run.progress.consumed_samples + run.settings.training.global_batch_size,
    )


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
