"""Command: how fast, and in how much memory, are shards turned into tokens, beside what others use?

    python benchmarks/benchmark_preprocessing.py --input 'shards/*.parquet' --tokenizer-model vocab.txt

Each run of a tool is a process of its own, start-up included, on as many cores as it has workers. The tools take turns
on the same parquet shards with the same vocabulary. Ratios are shown only if all have written the same number of tokens
and, where their files hold nothing but the ids of the text, the same bytes. MB are 10^6 bytes.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import CommandParser, ConfigError, DataError, run_command

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLE_SECONDS = 0.05
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
COMPARED = ("datatrove", "datasets")


@dataclass(frozen=True)
class Job:
    """What every tool is asked to do."""

    shards: str  # folder of links to the parquet files, in their order
    text_key: str
    tokenizer_model: str
    tokenizer_json: str  # the same tokenizer, for the peers
    special_tokens: int  # that it puts around each document


@dataclass(frozen=True)
class Tool:
    """One way from parquet to token ids."""

    command: Callable[[Job, str, int], list[str]]  # with the folder to write and the number of workers
    layout: str  # of its output: the step that counts it
    adds_special_tokens: bool
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One process tree, and what it has written."""

    tool: str
    workers: int
    wall_seconds: float
    cpu_seconds: float  # user and system, of all processes
    peak_bytes: int  # PSS summed over the processes
    output_bytes: int
    documents: int
    tokens: int  # special tokens around documents aside
    ids_sha256: str | None  # of the ids, where the tool writes nothing else


RunAll = Callable[..., list[Run]]  # what is left of run_in_turns: shards, rounds, title


def main() -> int:
    arguments = parse_arguments()
    tools = available_tools(arguments.tools)
    cores = len(os.sched_getaffinity(0))
    if max(arguments.workers) > cores:
        raise ConfigError(f"--workers {max(arguments.workers)} is above the {cores} cores of this machine; use fewer.")
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        given = {"patterns": arguments.input, "text_key": arguments.text_key, "model": arguments.tokenizer_model}
        facts = run_step("prepare", **given, folder=folder)
        print("{documents:,} documents, {text_bytes:,} bytes of text".format(**facts["corpus"]), flush=True)
        job = Job(shards="", **facts["job"])
        turns = [(tool, workers) for workers in arguments.workers for tool in tools]
        run_all = partial(run_in_turns, turns, job, folder=folder)
        # Compiles and caches what the first start would pay for; and a tool that does not work is found in seconds.
        run_all([facts["sample"]], rounds=1, title="warm-up")
        report = (report_memory if arguments.memory else report_speed)(run_all, facts, arguments)
    if arguments.output is not None:
        figures = json.dumps({"machine": facts["machine"], "corpus": facts["corpus"], **report}, indent=1)
        arguments.output.write_text(figures + "\n", encoding="utf-8")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="parquet shards: files, globs, folders")
    add("--tokenizer-model", required=True, metavar="PATH", help="as of preprocess_data.py")
    add("--text-key", default="content", help="column of the text (%(default)s)")
    add("--tools", type=_names, default=tuple(TOOLS), metavar="A,B", help=f"of {','.join(TOOLS)} (all)")
    add("--workers", type=_numbers, default=(1,), metavar="N,M", help="processes, one core each (1)")
    add("--rounds", type=_number, default=2, metavar="N", help="runs of each, of which the median counts (2)")
    add(
        "--memory",
        type=_numbers,
        metavar="N,M",
        help="instead: peak memory of this project's tools, with every shard read so many times, such as 1,10,100",
    )
    add("--output", type=Path, metavar="FILE", help="write all figures there as JSON")
    arguments = parser.parse_args()
    if arguments.memory:
        arguments.tools = tuple(name for name in arguments.tools if name.startswith("ours-"))
        if not arguments.tools:
            raise ConfigError("--memory measures ours-fast and ours-plain alone, and --tools names neither.")
    return arguments


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in TOOLS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(TOOLS)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_number(part) for part in text.split(","))


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def available_tools(names: Sequence[str]) -> list[str]:
    """Those whose packages are installed; says how to install the others."""
    found = []
    for name in names:
        if missing := [package for package in TOOLS[name].packages if importlib.util.find_spec(package) is None]:
            print(f"{name} is left out, without {' and '.join(missing)}: pip install 'megatron-neobert[benchmark]'")
        else:
            found.append(name)
    if not found:
        raise ConfigError(f"none of {', '.join(names)} is installed; install one, or name others after --tools.")
    return found


def step_command(step: str, **arguments: Any) -> list[str]:
    script = Path(__file__).with_name("benchmark_preprocessing_steps.py")
    return [sys.executable, str(script), step, json.dumps(arguments)]


def run_step(step: str, **arguments: Any) -> Any:
    """Result of a step; a step that fails has said why, and ends this process with its exit code."""
    command = step_command(step, **arguments)
    result = subprocess.run(command, stdout=subprocess.PIPE, env=tool_environment(), check=False)
    if result.returncode != 0:
        sys.exit(result.returncode)
    return json.loads(result.stdout)


def our_command(backend: str, job: Job, output: str, workers: int) -> list[str]:
    return [
        *(sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py")),
        *("--input", job.shards, "--text-key", job.text_key, "--output-prefix", f"{output}/corpus"),
        *("--tokenizer-model", job.tokenizer_model, "--tokenizer-backend", backend, "--workers", str(workers)),
    ]


def peer_command(step: str, job: Job, output: str, workers: int) -> list[str]:
    shared = {"shards": job.shards, "text_key": job.text_key, "tokenizer_json": job.tokenizer_json}
    return step_command(step, **shared, output=output, workers=workers)


TOOLS = {
    "ours-fast": Tool(partial(our_command, "fast"), "count-indexed", adds_special_tokens=False),
    "ours-plain": Tool(partial(our_command, "reference"), "count-indexed", adds_special_tokens=False),
    "datatrove": Tool(partial(peer_command, "datatrove"), "count-indexed", True, packages=("datatrove",)),
    "datasets": Tool(partial(peer_command, "datasets"), "count-dataset", True, packages=("datasets", "transformers")),
    "tokenizers": Tool(partial(peer_command, "tokenizers"), "count-bare-ids", adds_special_tokens=False),
}


def run_in_turns(
    turns: Sequence[tuple[str, int]], job: Job, shards: Sequence[str], *, folder: str, rounds: int, title: str = "round"
) -> list[Run]:
    """Runs every tool once a round, every other round in reverse, and compares what they have written."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(dir=folder) as links:
        for number, shard in enumerate(shards):  # the same file may occur many times, each time as another shard
            shutil.copyfile(shard, Path(links, f"{number:06d}.parquet"))  # links would be seen through, and read once
        for number in range(rounds):
            for tool, workers in turns[:: -1 if number % 2 else 1]:
                run = measure(tool, replace(job, shards=links), workers, folder)
                runs.append(run)
                print(
                    f"{title} {number + 1} | {name_of(run)} | {run.wall_seconds:.2f} s, "
                    f"{run.cpu_seconds:.2f} cpu-s | peak {run.peak_bytes / 1e6:,.0f} MB | {run.tokens:,} tokens",
                    flush=True,
                )
            verify(runs)
    return runs


def measure(name: str, job: Job, workers: int, folder: str) -> Run:
    """Runs one tool on as many cores as it has workers, and counts what it has written.

    Raises:
        DataError: The tool fails.
    """
    tool = TOOLS[name]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output, log = Path(scratch, "output"), Path(scratch, "log")
        output.mkdir()
        code, measured = run_measured(tool.command(job, str(output), workers), cores=workers, log=log, scratch=scratch)
        if code != 0:
            said = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise DataError(f"{name} ended with exit code {code}, so nothing is compared. It said:\n{said}")
        special_tokens = job.special_tokens if tool.adds_special_tokens else 0
        counted = run_step(tool.layout, output=str(output), special_tokens=special_tokens)
        if tool.adds_special_tokens:
            counted["ids_sha256"] = None
        output_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return Run(name, workers, **measured, output_bytes=output_bytes, **counted)


def run_measured(command: list[str], *, cores: int, log: Path, scratch: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and wall seconds, CPU seconds and peak memory of a command on the first cores that may be used."""
    allowed = os.sched_getaffinity(0)
    ended = threading.Event()
    with log.open("wb") as stream, ThreadPoolExecutor(1) as threads:
        os.sched_setaffinity(0, sorted(allowed)[:cores])  # which the command inherits
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=tool_environment(scratch)
        )
        os.sched_setaffinity(0, allowed)
        try:
            peak_bytes = threads.submit(watch_memory, process.pid, ended)
            _, status, usage = os.wait4(process.pid, 0)
            wall_seconds = time.perf_counter() - started
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            ended.set()
            if process.returncode is None:  # this process is interrupted
                process.kill()
    cpu_seconds = usage.ru_utime + usage.ru_stime + wait_for_orphans()
    measured = {"wall_seconds": wall_seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes.result()}
    return process.returncode, measured


def adopt_orphans() -> None:
    """Makes processes whose parents end the children of this one; a fork server outlives the tool that started it."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def wait_for_orphans() -> float:
    """CPU seconds of what a tool has left behind, and of all that this has waited for, once it has ended."""
    cpu_seconds = 0.0
    with suppress(ChildProcessError):  # none is left
        while True:
            _, _, usage = os.wait4(-1, 0)
            cpu_seconds += usage.ru_utime + usage.ru_stime
    return cpu_seconds


def tool_environment(scratch: str | None = None) -> dict[str, str]:
    """One thread per process, nothing from the network, and no cache that an earlier run has filled."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",  # Arrow obeys it too
        "ARROW_IO_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return environment | ({"HF_HOME": f"{scratch}/cache", "TMPDIR": scratch} if scratch else {})


def watch_memory(pid: int, ended: threading.Event) -> int:
    """Peak of the memory of a process and all below it, in bytes, until `ended`."""
    peak = tree_memory(pid)
    while not ended.wait(SAMPLE_SECONDS):
        peak = max(peak, tree_memory(pid))
    return peak


def tree_memory(pid: int) -> int:
    """PSS in bytes: pages that several of the processes share count once."""
    import psutil

    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
    return total


def verify(runs: Sequence[Run]) -> None:
    """Refuses runs that did not do the same work.

    Raises:
        DataError: Tools wrote different numbers of tokens, or different ids where they wrote nothing but ids.
    """
    counts = [(name_of(run), f"{run.tokens:,}") for run in runs]
    hashes = [(name_of(run), run.ids_sha256[:12]) for run in runs if run.ids_sha256]
    for what, found in (("numbers of tokens", counts), ("ids, by sha256", hashes)):
        if len({value for _, value in found}) > 1:
            each = ", ".join(f"{name} {value}" for name, value in dict.fromkeys(found))
            raise DataError(
                f"the tools wrote different {what}: {each}. Only tools that do the same work are compared; leave out "
                "the one that is wrong (--tools)."
            )


def name_of(run: Run) -> str:
    return f"{run.tool} ({run.workers} worker{'s' if run.workers > 1 else ''})"


def report_speed(run_all: RunAll, facts: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints the table, and returns all figures."""
    runs = run_all(facts["shards"], rounds=arguments.rounds)
    rows = summarise(runs, text_bytes=facts["corpus"]["text_bytes"])
    print_table(rows)
    same = sorted({run.tool for run in runs if run.ids_sha256})
    print(f"all wrote {runs[0].tokens:,} tokens" + (f"; the same ids: {', '.join(same)}" if len(same) > 1 else ""))
    return {"tokens": runs[0].tokens, "table": rows, "runs": [asdict(run) for run in runs]}


def summarise(runs: Sequence[Run], *, text_bytes: int) -> list[dict[str, Any]]:
    """One row for each tool and number of workers: medians, and the peers' wall time as a multiple of the tool's."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.tool, run.workers), []).append(run)
    wall = {key: statistics.median(run.wall_seconds for run in group) for key, group in groups.items()}
    rows = []
    for (tool, workers), group in groups.items():
        seconds, cpu_seconds = wall[tool, workers], statistics.median(run.cpu_seconds for run in group)
        row = {
            "tool": tool,
            "workers": workers,
            "wall s": seconds,
            "MB/s": text_bytes / 1e6 / seconds,
            "CPU s": cpu_seconds,
            "MB/cpu-s": text_bytes / 1e6 / cpu_seconds,
            "peak MB": max(run.peak_bytes for run in group) / 1e6,
            "output MB": group[0].output_bytes / 1e6,
        }
        peers = {peer: wall.get((peer, workers)) for peer in COMPARED}
        rows.append(row | {f"x {peer}": theirs and theirs / seconds for peer, theirs in peers.items()})
    return rows


def report_memory(run_all: RunAll, facts: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures at every size, prints the table, and returns all figures."""
    runs = [(times, run) for times in arguments.memory for run in run_all(facts["shards"] * times, rounds=1)]
    rows = [
        {
            "tool": run.tool,
            "workers": run.workers,
            "x shards": times,
            "tokens": run.tokens,
            "text MB": times * facts["corpus"]["text_bytes"] / 1e6,
            "wall s": run.wall_seconds,
            "peak MB": run.peak_bytes / 1e6,
        }
        for times, run in sorted(runs, key=lambda item: (item[1].tool, item[1].workers, item[0]))
    ]
    print_table(rows)
    return {"memory": rows}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print(" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
    return "-" if value is None else str(value)


if __name__ == "__main__":
    run_command(main)
