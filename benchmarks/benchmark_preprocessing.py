"""Measure the speed and the memory of tokenising input files, in comparison with other tools.

    python benchmarks/benchmark_preprocessing.py --input 'texts/*.parquet' --tokenizer-model vocab.txt

Each run of a tool is a new process, with start-up included, on as many cores as it has workers. The tools take turns on
the same parquet files with the same vocabulary. The table is printed only if all tools wrote the same number of tokens,
and the same ids if their files contain only the ids of the text. MB are 10^6 bytes; peak memory is that of the tool's
largest process.

No package contains Megatron-LM's tool: --megatron-lm names the file in a checkout. The tool needs the rest of
Megatron-LM, which megatron-core 0.19 includes, and reads JSON lines, which are written for it first.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from benchmarks.shared import describe_machine, in_turns, positive, print_table, write_figures
from megatron_neobert.cli import Parser
from megatron_neobert.errors import ConfigError, DataError, run_command
from megatron_neobert.text import counted, parse_json

REPOSITORY = Path(__file__).resolve().parents[1]
COMPARED = ("datatrove", "datasets", "megatron")
PACKAGES = ("tokenizers", "nanotoken", "pyarrow", "numpy", "datatrove", "datasets", "transformers")


@dataclass(frozen=True)
class Job:
    """Input of every tool."""

    folder: str  # with the parquet files, sorted by name
    text_key: str
    tokenizer_model: str
    tokenizer_json: str  # the same tokenizer for the other tools
    special_tokens: int  # number of tokens that tokenizer_json adds to each document
    megatron_lm: str  # path of Megatron-LM's tools/preprocess_data.py


@dataclass(frozen=True)
class Tool:
    """Tool that turns parquet files into token ids."""

    command: Callable[[Job, str, int], list[str]]  # of the job, the output folder and the number of workers
    packages: tuple[str, ...] = ()
    adds_special_tokens: bool = False


@dataclass(frozen=True)
class Measured:
    """Figures of one run of a tool."""

    tool: str
    workers: int
    wall_seconds: float
    cpu_seconds: float  # user and system time of the process and its children
    peak_bytes: int  # peak memory of the largest of these processes
    documents: int
    tokens: int  # without special tokens around documents
    ids_sha256: str | None  # hash of the ids, if the tool writes only ids

    @property
    def name(self) -> str:
        return f"{self.tool} ({counted(self.workers, 'worker')})"


def main() -> int:
    """Measure every tool in turns, print the table, and write the figures to --output if given. Return exit code 0.

    Raises:
        ConfigError: No tool can run.
        DataError: A tool fails, or the tools wrote different tokens.
        SystemExit: A step fails, such as reading the inputs or counting the tokens of a tool.
    """
    arguments = parse_arguments()
    tools = available_tools(arguments.tools, megatron_lm=arguments.megatron_lm)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        inputs = {"patterns": arguments.input, "text_key": arguments.text_key, "model": arguments.tokenizer_model}
        prepared = run_step("prepare", **inputs, folder=folder)
        corpus = prepared["corpus"]
        print("{documents:,} documents, {text_bytes:,} bytes of text".format(**corpus), flush=True)
        job = Job(folder="", megatron_lm=arguments.megatron_lm, **prepared["job"])
        turns = [(tool, workers) for workers in arguments.workers for tool in tools]
        measure_all = partial(run_in_turns, turns, job, folder=folder)
        # The first start of a tool compiles and caches; and a tool that does not work fails within seconds.
        measure_all([prepared["sample"]], rounds=1, title="warm-up")
        runs = measure_all(prepared["files"], rounds=arguments.rounds)
    rows = summarise(runs, text_bytes=corpus["text_bytes"])
    print_table(rows)
    same = sorted({run.tool for run in runs if run.ids_sha256})
    print(f"all wrote {runs[0].tokens:,} tokens" + (f"; the same ids: {', '.join(same)}" if len(same) > 1 else ""))
    figures = {"machine": describe_machine(PACKAGES), "corpus": corpus, "tokens": runs[0].tokens, "table": rows}
    write_figures(arguments.output, {**figures, "runs": [asdict(run) for run in runs]})
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="parquet files: paths, globs or folders")
    add("--tokenizer-model", required=True, metavar="PATH", help="tokenizer, as for neobert preprocess")
    add("--text-key", default="content", help="column of the text (%(default)s)")
    add("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="default: all")
    add("--megatron-lm", default="", metavar="FILE", help="tools/preprocess_data.py in a checkout of Megatron-LM")
    add("--workers", type=positive, nargs="+", default=[1], metavar="N", help="processes, one core each (1)")
    add("--rounds", type=positive, default=2, metavar="N", help="runs of each tool; the table has medians (2)")
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON to this file")
    return parser.parse_args()


def available_tools(names: Sequence[str], *, megatron_lm: str = "") -> list[str]:
    """Return the tools in `names` that can run; print what the others need. Raise ConfigError if none can run."""
    available = []
    for name in names:
        if missing := [package for package in TOOLS[name].packages if importlib.util.find_spec(package) is None]:
            print(f"skipping {name}, which needs {' and '.join(missing)}: pip install 'megatron-neobert[benchmark]'")
        elif name == "megatron" and not megatron_lm:
            print(f"skipping {name}, which needs --megatron-lm")
        else:
            available.append(name)
    if not available:
        raise ConfigError(f"none of {', '.join(names)} can run; install one of them, or name others after --tools.")
    return available


def step_command(step: str, **arguments: Any) -> list[str]:
    script = Path(__file__).with_name("benchmark_preprocessing_steps.py")
    return [sys.executable, str(script), step, json.dumps(arguments)]


def run_step(step: str, **arguments: Any) -> Any:
    """Run a step as a new process and return its result. If the step fails, this process exits with the same code."""
    command = step_command(step, **arguments)
    result = subprocess.run(command, stdout=subprocess.PIPE, env=tool_environment(), check=False)
    if result.returncode != 0:
        sys.exit(result.returncode)
    return parse_json(result.stdout)


def our_command(backend: str, job: Job, output: str, workers: int) -> list[str]:
    return [
        *(sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py")),
        *("--input", job.folder, "--text-key", job.text_key, "--output-prefix", f"{output}/corpus"),
        *("--tokenizer-model", job.tokenizer_model, "--tokenizer-backend", backend, "--workers", str(workers)),
    ]


def peer_command(step: str, job: Job, output: str, workers: int) -> list[str]:
    shared = {"folder": job.folder, "text_key": job.text_key, "tokenizer_json": job.tokenizer_json}
    return step_command(step, **shared, output=output, workers=workers)


def megatron_command(job: Job, output: str, workers: int) -> list[str]:
    return [
        *(sys.executable, job.megatron_lm, "--input", f"{job.folder}.jsonl", "--json-keys", job.text_key),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(Path(job.tokenizer_json).parent)),
        *("--tokenizer-hf-no-include-special-tokens", "--output-prefix", f"{output}/corpus", "--workers", str(workers)),
        # The tool ends with a summary of earlier runs, and fails if there is none.
        *("--performance-dir", f"{job.folder}.performance"),
    ]


TOOLS = {
    "ours-fast": Tool(partial(our_command, "fast")),
    "ours-plain": Tool(partial(our_command, "reference")),
    "datatrove": Tool(partial(peer_command, "datatrove"), ("datatrove",), adds_special_tokens=True),
    "datasets": Tool(partial(peer_command, "datasets"), ("datasets", "transformers"), adds_special_tokens=True),
    "megatron": Tool(megatron_command, packages=("transformers",)),
}


def run_in_turns(
    turns: Sequence[tuple[str, int]], job: Job, files: Sequence[str], *, folder: str, rounds: int, title: str = "round"
) -> list[Measured]:
    """Run all `turns` once per round, print a line per run, and return the figures of the runs in the order they ran.

    Args:
        turns: Pairs of a tool and its number of workers.
        job: Its `folder` is replaced by a temporary subfolder of `folder` with copies of `files`.

    Raises:
        DataError: A tool fails, or the tools wrote different tokens.
    """
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory(dir=folder) as copies:
        # All tools can read a folder, in the order of the names.
        for number, file in enumerate(files):
            shutil.copyfile(file, Path(copies, f"{number:06d}.parquet"))
        if any(tool == "megatron" for tool, _ in turns):
            run_step("json-lines", folder=copies, text_key=job.text_key)
        for number, (tool, workers) in in_turns(turns, rounds=rounds):
            run = measure(tool, replace(job, folder=copies), workers, folder)
            runs.append(run)
            print(
                f"{title} {number} | {run.name} | {run.wall_seconds:.2f} s, {run.cpu_seconds:.2f} cpu-s | "
                f"peak {run.peak_bytes / 1e6:,.0f} MB | {run.tokens:,} tokens",
                flush=True,
            )
            if len(runs) % len(turns) == 0:
                verify(runs)
    return runs


def measure(name: str, job: Job, workers: int, folder: str) -> Measured:
    """Run the tool `name` on as many cores as it has workers, and return its figures. Delete its output in `folder`.

    Raise DataError if the tool fails.
    """
    tool = TOOLS[name]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output, log = Path(scratch, "output"), Path(scratch, "log")
        output.mkdir()
        code, measured = run_measured(tool.command(job, str(output), workers), cores=workers, log=log, scratch=scratch)
        if code != 0:
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise DataError(f"{name} ended with exit code {code}; fix or exclude it (--tools). Its last output:\n{end}")
        special_tokens = job.special_tokens if tool.adds_special_tokens else 0
        written = run_step("count", output=str(output), special_tokens=special_tokens)
    return Measured(name, workers, **measured, **written)


def run_measured(command: list[str], *, cores: int, log: Path, scratch: str) -> tuple[int, dict[str, Any]]:
    """Run a command to its end, on the first `cores` cores that this process may use.

    Args:
        log: File for the output and the errors of the command.
        scratch: Folder for caches and temporary files of the command.

    Returns:
        The exit code (negative after a signal), and a dictionary with `wall_seconds`, `cpu_seconds` and `peak_bytes`
        (resident memory of the largest process).
    """
    allowed = os.sched_getaffinity(0)
    with log.open("wb") as stream:
        # The command inherits the cores.
        os.sched_setaffinity(0, sorted(allowed)[:cores])
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=tool_environment(scratch)
        )
        os.sched_setaffinity(0, allowed)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            # After Ctrl-C, the tool must not continue.
            process.kill()
            raise
        wall_seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    figures = {
        "wall_seconds": wall_seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    return process.returncode, figures


def tool_environment(scratch: str | None = None) -> dict[str, str]:
    """Return os.environ with this repository on PYTHONPATH, one thread per process and no downloads from the Hub.

    With `scratch`, a folder, caches and temporary files go there.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",  # also read by Arrow
        "ARROW_IO_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return environment | ({"HF_HOME": f"{scratch}/cache", "TMPDIR": scratch} if scratch else {})


def verify(runs: Sequence[Measured]) -> None:
    """Raise DataError if runs have different `tokens`, or different `ids_sha256` among those that are not None."""
    counts = [(run.name, f"{run.tokens:,}") for run in runs]
    hashes = [(run.name, run.ids_sha256[:12]) for run in runs if run.ids_sha256]
    for compared, values in (("numbers of tokens", counts), ("ids, by sha256", hashes)):
        if len({value for _, value in values}) > 1:
            by_tool = ", ".join(f"{name} {value}" for name, value in dict.fromkeys(values))
            raise DataError(
                f"the tools wrote different {compared}: {by_tool}. Only tools that do the same work are compared; "
                "exclude the wrong tool (--tools)."
            )


def summarise(runs: Sequence[Measured], *, text_bytes: int) -> list[dict[str, Any]]:
    """Return a row per tool and workers: medians, peak memory, and how many times faster than each of COMPARED."""
    groups: dict[tuple[str, int], list[Measured]] = {}
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
        }
        ratios = {f"x {peer}": wall[peer, workers] / seconds for peer in COMPARED if (peer, workers) in wall}
        rows.append(row | dict.fromkeys(f"x {peer}" for peer in COMPARED) | ratios)
    return rows


if __name__ == "__main__":
    run_command(main)
