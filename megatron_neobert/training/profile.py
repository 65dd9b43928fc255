"""Profile of some iterations: a trace of torch's profiler, on GPUs with Megatron's NVTX ranges."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.utils import configure_nvtx_profiling
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_neobert.runtime.environment import is_rank_zero
from megatron_neobert.state import Run

_WARM_UP = 1  # iterations before the trace, so that the start of the profiler is not in the trace


@contextmanager
def profiling(run: Run, *, log: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Context manager: write a trace of the iterations in --profile to SAVE/profile, on rank 0.

    Yield a function to call after each step.

    If the run resumes within these iterations, only the remaining iterations are traced. The first iteration after a
    start is never traced. Failures to write the trace are logged.
    """
    done = run.state.iteration
    first, last = run.settings.logging.profiled_iterations or (0, 0)
    first = max(first, done + 1 + _WARM_UP)
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

    skipped = first - _WARM_UP - done - 1
    iterations = schedule(skip_first=skipped, wait=0, warmup=_WARM_UP, active=last - first + 1, repeat=1)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, schedule=iterations, on_trace_ready=write) as profiler:
        yield profiler.step
