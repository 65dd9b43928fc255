"""The training loop: read a batch, train, log, validate, save, stop."""

import functools
import gc
import importlib.util
import itertools
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.utils import configure_nvtx_profiling
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_neobert.checkpoint.folder import check_folders, claim
from megatron_neobert.checkpoint.load import find_checkpoint, load_from
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.checkpoint.start import refuse_full_disk
from megatron_neobert.checkpoint.train_state import TrainState
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.resume_rules import ReadCorpus
from megatron_neobert.config.schedule import schedule_warnings
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.batch import RankBatches
from megatron_neobert.data.batches.loader import build_dali_loader, build_loader, named_worker_deaths
from megatron_neobert.errors import EXIT_INTERRUPTED, EXIT_STOPPED_EARLY, DivergenceError
from megatron_neobert.model.flops import count_parameters
from megatron_neobert.model.kernels import choose_kernels, engine_attention
from megatron_neobert.planning.plan import start_warnings
from megatron_neobert.runtime import distributed
from megatron_neobert.runtime.environment import is_rank_zero, world_size
from megatron_neobert.runtime.signals import reason_to_stop, requested_stop
from megatron_neobert.runtime.watcher import Watcher
from megatron_neobert.state import LoopControl, MetricSums, RankStatus, Run, StepResult
from megatron_neobert.text import counted
from megatron_neobert.training.metrics import Monitor
from megatron_neobert.training.setup import build_run, join
from megatron_neobert.training.step import share_status, train_step, validation_step

MOST_SKIPPED = 10  # skipped updates in a row after which a run ends as diverged
# A collection takes 0.5 ms once the objects of the first step are frozen, and 0.65 s before (28 layers, on CPU). A step
# on CPU leaves no cycles, so ten steps bound the memory that cycles of other libraries hold.
_GARBAGE_STEPS = 10
_PROFILER_WARM_UP = 1  # iterations before the trace, so that the start of the profiler is not in the trace


def run_training(settings: Settings, watcher: Watcher) -> int:
    """Build a run, load the newest checkpoint if there is one, train, and return the exit code of `train`.

    The folder --save is created, and locked until training ends. Raise ModuleNotFoundError if --wandb-project is set,
    and wandb is not installed. Collective: all ranks.
    """
    if settings.logging.wandb_project is not None:
        spec = importlib.util.find_spec("wandb")
        # W&B creates a folder `wandb` beside a run, which Python finds as a package without an origin.
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("--wandb-project needs the package wandb", name="wandb")
    watcher.mark("checking the folders")
    check_folders(settings.checkpoint)
    with claim(settings.checkpoint.save if is_rank_zero() else None):
        check_folders(settings.checkpoint)  # again: a run that held the lock may have saved its first checkpoint
        watcher.mark("joining the other ranks")
        opened, device = join(settings)
        watcher.mark("checking the disk")
        refuse_full_disk(settings, vocab_size=opened[0].tokenizer.vocab_size)
        watcher.mark("building the model")
        found = find_checkpoint(settings)
        # Drawing takes a second per 100 M parameters.
        run = build_run(settings, opened, device, draws_weights=found is None)
        run.tick = watcher.tick
        watcher.mark("loading")
        if found is not None:
            load_from(run, found.folder, has_new_data=found.has_new_data)
        monitor = Monitor(settings, iteration=run.state.iteration, vocab_size=run.tokenizer.vocab_size, device=device)
        lines = []
        if run.state.iteration < settings.training.train_iters:
            monitor.log(_opening_line(run, found.folder if found else None))
            lines = [choose_kernels(settings).summary, *schedule_warnings(settings)]
        if settings.checkpoint.save is None:
            monitor.log("warning: without --save the trained weights are lost at the end; add --save FOLDER")
        if found is None:
            cores = len(os.sched_getaffinity(0)) if device.type == "cpu" else None
            lines += start_warnings(settings, opened, world_size=world_size(), cpu_cores=cores)
        for line in lines:
            monitor.log(textwrap.fill(line, 80, subsequent_indent="  "))
        with monitor, named_worker_deaths():
            code = train(run, monitor, watcher)
        if run.graph is not None:
            run.graph.free()
        distributed.shut_down()
        return code


def train(run: Run, monitor: Monitor, watcher: Watcher) -> int:
    """Train from `run.state` until the last iteration, a stop request, or a failure. Changes `run`.

    Returns:
        The exit code: 0 after the last iteration, 75 after a stop with a checkpoint, 130 after a stop without one.

    Collective: all ranks.
    """
    saver = Saver(run, log=monitor.log)
    control = _prepare_first_iteration(run, monitor, saver, watcher)
    if control.ends:
        saver.finish()
        return _exit_code(run, monitor, control)
    attention: str | None = None
    with collecting_together() as collect_garbage, profiling(run, log=monitor.log) as end_profiled_step:
        stream = replace(run.training_stream, iteration=run.state.iteration, cursor=run.state.cursor)
        build: Callable[..., Iterator[RankBatches]] = build_loader
        if run.settings.data.dataloader_type == "dali":
            build = functools.partial(build_dali_loader, device=run.device)
        loader = build(stream, num_workers=run.settings.data.num_workers)
        while not control.ends:
            watcher.mark("waiting for data", run.state.iteration + 1)
            with monitor.waiting():
                batches = next(loader)
            for change in run.settings.training.phases:
                if change.after_iters == run.state.iteration:
                    monitor.log(f"a phase begins with iteration {run.state.iteration + 1}: {change.flags}")
            watcher.mark("training", run.state.iteration + 1)
            learning_rate = run.optimizer.param_groups[0]["lr"]
            result = train_step(run, batches)
            run.state = _state_after_step(run, batches, result)
            monitor.add(result, run.state)
            # Transformer Engine chooses its kernel in the first step.
            if attention != (attention := engine_attention()):
                monitor.log(f"Transformer Engine computes attention by {attention}")
            control = _control_after_step(run, result)
            # Publish a checkpoint once all ranks have written it in the background.
            if not result.status.is_saving:
                saver.finish()
            if control.logs:
                monitor.close_interval(run.state, lr=learning_rate, grad_norm=result.grad_norm)
            if control.validates:
                control = _validate(run, monitor, saver, watcher, control)
            if control.saves:
                watcher.mark("saving", run.state.iteration)
                saver.save()
            if control.saves or control.validates:
                monitor.start_interval()
            collect_garbage()
            end_profiled_step()
    saver.finish()
    if control.stop is None and run.settings.checkpoint.save is None:
        monitor.log("warning: the trained weights are lost, because no --save was given")
    return _exit_code(run, monitor, control)


def _prepare_first_iteration(run: Run, monitor: Monitor, saver: Saver, watcher: Watcher) -> LoopControl:
    """Set the callbacks of `run`, repeat a validation that was interrupted, and return the decisions before training.

    The run ends at once if its last iteration is already saved or a stop was requested. Collective: all ranks.
    """

    def read_status(*, has_trained: bool = True) -> RankStatus:
        stop_code = requested_stop(run.settings, has_trained=has_trained)
        return RankStatus(
            stop_code,
            is_saving=int(saver.is_writing),
            memory_mib=monitor.used_memory_mib(),
            compute_us=monitor.compute_us,
        )

    run.read_status = functools.partial(read_status, has_trained=False)
    status = share_status(run)
    training, iteration = run.settings.training, run.state.iteration
    control = LoopControl(
        stop=reason_to_stop(training, iteration=iteration, agreed_code=status.stop_code),
        is_last=iteration >= training.train_iters,
    )
    if control.stop is None and _validation_is_due(run):
        control = _validate(run, monitor, saver, watcher, control)
    run.read_status, run.has_gradients = read_status, monitor.stop_clock
    if control.is_last and control.stop is None:
        monitor.log(f"already trained: iteration {iteration} of {training.train_iters} is saved")
    return control


def _control_after_step(run: Run, result: StepResult) -> LoopControl:
    training, checkpoint, iteration = run.settings.training, run.settings.checkpoint, run.state.iteration
    stop = reason_to_stop(training, iteration=iteration, agreed_code=result.status.stop_code)
    if stop is None and iteration < training.train_iters and _is_due(iteration, training.exit_interval):
        stop = f"--exit-interval {training.exit_interval}"
    failure, skipped = None, run.state.skipped_in_a_row
    # Also at a multiple: a run that resumes after the error may skip as many updates again.
    if skipped and skipped % MOST_SKIPPED == 0:
        failure = (
            f"the updates of the last {skipped} iterations, {iteration - skipped + 1} to {iteration}, were skipped, "
            "because loss or gradient norm was not finite or no token was predicted. Inspect the batch with neobert "
            f"replay --load {checkpoint.save or 'SAVE'} --iteration {iteration} --checkpoint-iteration {iteration}; "
            "then continue from an earlier checkpoint, with a lower --lr or other data."
        )
    control = LoopControl(stop=stop, failure=failure, is_last=iteration == training.train_iters)
    is_saved = control.ends or _is_due(iteration, checkpoint.save_interval)
    validates = not (control.stop or control.failure) and _validation_is_due(run)
    # Losses of two objectives have no common mean, and the next phase has another cost per token.
    ends_phase = phase_at(run.settings, iteration).last == iteration
    return replace(
        control,
        validates=validates,
        saves=is_saved and checkpoint.save is not None,
        logs=is_saved or validates or ends_phase or _is_due(iteration, run.settings.logging.log_interval),
    )


def _validate(run: Run, monitor: Monitor, saver: Saver, watcher: Watcher, control: LoopControl) -> LoopControl:
    """Compute and log the loss over the first `eval_iters` batches of each held-out corpus. Updates `run.state`.

    The objective comes from the current phase, all other settings from the first phase. A stop request ends the
    validation without a log line. The validation is repeated when the run resumes.

    Return `control`. After a stop request, return a copy: `stop` is the reason, and `saves` is True if --save is set.
    Collective: all ranks.
    """
    training, iteration = run.settings.training, run.state.iteration
    objective = phase_at(run.settings, iteration).settings.data.objective
    settings = run.training_stream.phases[0].settings.with_section("data", objective=objective)
    validation = (
        (name, batches)
        for name, stream in run.validation_streams.items()
        for batches in itertools.islice(stream.with_settings(settings).rank_batches(), training.eval_iters)
    )
    sums: dict[str, MetricSums] = {}
    stop: str | None = None
    run.model.eval()
    for name, batches in validation:
        watcher.mark("validating", iteration)
        result = validation_step(run, batches)
        sums[name] = sums.get(name, MetricSums()) + result.sums
        if not result.status.is_saving:
            saver.finish()
        stop = reason_to_stop(training, iteration=iteration, agreed_code=result.status.stop_code)
        if stop is not None:
            break
    run.model.train()
    if stop is not None:
        return replace(control, stop=stop, saves=run.settings.checkpoint.save is not None)
    run.state = replace(run.state, validated_iteration=iteration)
    monitor.report_validation(
        run.state, sums, {name: stream.bytes_per_token for name, stream in run.validation_streams.items()}
    )
    return control


def _validation_is_due(run: Run) -> bool:
    iteration, training = run.state.iteration, run.settings.training
    return (
        bool(run.validation_streams)
        and iteration > run.state.validated_iteration
        and (iteration == training.train_iters or _is_due(iteration, training.eval_interval))
    )


def _exit_code(run: Run, monitor: Monitor, control: LoopControl) -> int:
    """Log the reason of a stop, and return `train`'s exit code. Raise DivergenceError if `control.failure` is set."""
    if control.failure is not None:
        raise DivergenceError(control.failure)
    if control.stop is None:
        return 0
    is_saved = run.settings.checkpoint.save is not None
    warning = "" if is_saved else "; nothing was saved, there is no --save"
    position = f"iteration {run.state.iteration} of {run.settings.training.train_iters}"
    monitor.log(f"stopped after {position}: {control.stop}{warning}")
    return EXIT_STOPPED_EARLY if is_saved else EXIT_INTERRUPTED


def _opening_line(run: Run, loaded: Path | None) -> str:
    settings = run.settings
    parameters = count_parameters(settings.model, vocab_size=run.tokenizer.vocab_size).total
    ranks = torch.distributed.get_world_size()
    phase = phase_at(settings, run.state.iteration + 1).settings
    micro_batches = counted(phase.micro_batches_per_rank(ranks), "micro-batch", "micro-batches")
    device = "CPU" if run.device.type == "cpu" else "GPU"
    start = f"from {loaded}" if loaded else f"from random weights (seed {settings.training.seed})"
    return (
        f"training {parameters:,} parameters {start} on {counted(ranks, f'{device} rank')}, "
        f"{phase.tokens_per_iteration:,} tokens per iteration, in {micro_batches} of "
        f"{counted(phase.training.micro_batch_size, 'packed sequence')} per rank"
    )


def _state_after_step(run: Run, batches: RankBatches, result: StepResult) -> TrainState:
    """Return the train state after a step, whether or not the update was skipped."""
    iteration = run.state.iteration + 1
    phase = phase_at(run.settings, iteration)
    skipped = int(result.skip_reason is not None)
    seed, split = phase.settings.training.seed, phase.settings.data.share_of_data_path
    opened = run.opened[phase.number]
    read = (ReadCorpus(sha256, seed, split) for sha256 in opened.corpora)
    return replace(
        run.state,
        iteration=iteration,
        corpus_sha256=opened.sha256,
        cursor=batches.cursor_after,
        read_corpora=tuple(dict.fromkeys((*run.state.read_corpora, *read))),
        consumed_samples=run.state.consumed_samples + phase.settings.training.global_batch_size,
        consumed_tokens=run.state.consumed_tokens + round(result.sums.tokens),
        skipped_iterations=run.state.skipped_iterations + skipped,
        skipped_in_a_row=(run.state.skipped_in_a_row + 1) * skipped,
    )


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0


# ---- between steps


@contextmanager
def collecting_together() -> Iterator[Callable[[], None]]:
    """Context manager: yield a function to call after each step, which collects garbage after steps 1, 11, 21, ...

    Python's automatic collections would run at different steps on different ranks, and all ranks would wait each time.
    Objects that exist after the first step are exempt from collection until the context ends.
    """
    steps = itertools.count()

    def collect_after_step() -> None:
        step = next(steps)
        if step % _GARBAGE_STEPS == 0:
            gc.collect()
        if step == 0:
            # Not earlier, because the loader has forked its workers now, and they need collections of their own.
            gc.disable()
            gc.freeze()

    try:
        yield collect_after_step
    finally:
        gc.unfreeze()
        gc.enable()


@contextmanager
def profiling(run: Run, *, log: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Context manager: write a trace of the iterations in --profile to SAVE/profile, on rank 0.

    Yield a function to call after each step.

    If the run resumes within these iterations, only the remaining iterations are traced. The first iteration after a
    start is never traced. Failures to write the trace are logged.
    """
    done = run.state.iteration
    first, last = run.settings.logging.profiled_iterations or (0, 0)
    first = max(first, done + 1 + _PROFILER_WARM_UP)
    if first > last or not is_rank_zero():
        yield lambda: None
        return
    on_gpu = run.device.type == "cuda"
    configure_nvtx_profiling(on_gpu)

    def write(profiler: profile) -> None:
        configure_nvtx_profiling(False)
        reached = min(last, run.state.iteration)
        path = Path(run.settings.checkpoint.save or "") / "profile" / f"iterations_{first}_to_{reached}.json.gz"
        try:
            path.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
            log(f"profile of iterations {first} to {reached}: {path}; open it at https://ui.perfetto.dev")
        except OSError as error:
            log(f"warning: the profile could not be written to {path} ({error}); training continues")

    skipped = first - _PROFILER_WARM_UP - done - 1
    iterations = schedule(skip_first=skipped, wait=0, warmup=_PROFILER_WARM_UP, active=last - first + 1, repeat=1)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, schedule=iterations, on_trace_ready=write) as profiler:
        yield profiler.step
