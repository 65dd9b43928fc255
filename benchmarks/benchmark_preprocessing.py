"""Measure the speed and the memory of turning input files into tokens, beside other tools.

    python benchmarks/benchmark_preprocessing.py --input 'shards/*.parquet' --tokenizer-model vocab.txt

Each run of a tool is a process of its own, start-up included, on as many cores as it has workers. The tools take turns
on the same parquet shards with the same vocabulary. Ratios are shown only if all have written the same number of tokens
and, where their files hold nothing but the ids of the text, the same bytes. MB are 10^6 bytes; peak memory is that of
the tool's largest process.

Megatron-LM's own tool is in none of its packages: --megatron-lm names the file of a checkout. It needs the rest of
Megatron-LM, which megatron-core 0.19 brings, and reads JSON lines, which are written for it beforehand.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from benchmarks.shared import describe_machine, in_turns, positive, print_table, write_figures
from megatron_neobert.cli import Parser
from megatron_neobert.errors import ConfigError, DataError, run_command
from megatron_neobert.text import parse_json

REPOSITORY = Path(__file__).resolve().parents[1]
COMPARED = ("datatrove", "datasets", "megatron")
PACKAGES = ("tokenizers", "nanotoken", "gigatoken", "pyarrow", "numpy", "datatrove", "datasets", "transformers")


@dataclass(frozen=True)
class Job:
    """Task of every tool."""

    shards: str  # folder of the parquet files, in their order
    text_key: str
    tokenizer_model: str
    tokenizer_json: str  # the same tokenizer, for the peers
    special_tokens: int  # that it puts around each document
    megatron_lm: str  # Megatron-LM's tools/preprocess_data.py


@dataclass(frozen=True)
class Tool:
    """One way from parquet to token ids."""

    command: Callable[[Job, str, int], list[str]]  # with the folder to write and the number of workers
    packages: tuple[str, ...] = ()
    adds_special_tokens: bool = False


@dataclass(frozen=True)
class Measured:
    """One process tree, and what it has written."""

    tool: str
    workers: int
    wall_seconds: float
    cpu_seconds: float  # user and system, of the process and all that it waited for
    peak_bytes: int  # of the largest of these processes
    documents: int
    tokens: int  # special tokens around documents aside
    ids_sha256: str | None  # of the ids, where the tool writes nothing else

    @property
    def name(self) -> str:
        return f"{self.tool} ({self.workers} worker{'s' if self.workers > 1 else ''})"


def main() -> int:
    """Prepare the inputs, measure every tool in turns, and print the table."""
    arguments = parse_arguments()
    tools = available_tools(arguments.tools, megatron_lm=arguments.megatron_lm)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        given = {"patterns": arguments.input, "text_key": arguments.text_key, "model": arguments.tokenizer_model}
        facts = run_step("prepare", **given, folder=folder)
        corpus = facts["corpus"]
        print("{documents:,} documents, {text_bytes:,} bytes of text".format(**corpus), flush=True)
        job = Job(shards="", megatron_lm=arguments.megatron_lm, **facts["job"])
        turns = [(tool, workers) for workers in arguments.workers for tool in tools]
        measure_all = partial(run_in_turns, turns, job, folder=folder)
        # Compiles and caches what the first start would pay for; and a tool that does not work is found in seconds.
        measure_all([facts["sample"]], rounds=1, title="warm-up")
        runs = measure_all(facts["shards"], rounds=arguments.rounds)
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
    add("--input", nargs="+", required=True, metavar="PATH", help="parquet shards: files, globs, folders")
    add("--tokenizer-model", required=True, metavar="PATH", help="as of preprocess_data.py")
    add("--text-key", default="content", help="column of the text (%(default)s)")
    add("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="default: all")
    add("--megatron-lm", default="", metavar="FILE", help="tools/preprocess_data.py of a checkout of Megatron-LM")
    add("--workers", type=positive, nargs="+", default=[1], metavar="N", help="processes, one core each (1)")
    add("--rounds", type=positive, default=2, metavar="N", help="runs of each, of which the median counts (2)")
    add("--output", type=Path, metavar="FILE", help="write all figures there as JSON")
    return parser.parse_args()


def available_tools(names: Sequence[str], *, megatron_lm: str = "") -> list[str]:
    """Return the tools whose packages are installed; print how to install the others."""
    found = []
    for name in names:
        if missing := [package for package in TOOLS[name].packages if importlib.util.find_spec(package) is None]:
            print(f"{name} is left out, without {' and '.join(missing)}: pip install 'megatron-neobert[benchmark]'")
        elif name == "megatron" and not megatron_lm:
            print(f"{name} is left out, without --megatron-lm")
        else:
            found.append(name)
    if not found:
        raise ConfigError(f"none of {', '.join(names)} is installed; install one, or name others after --tools.")
    return found


def step_command(step: str, **arguments: Any) -> list[str]:
    script = Path(__file__).with_name("benchmark_preprocessing_steps.py")
    return [sys.executable, str(script), step, json.dumps(arguments)]


def run_step(step: str, **arguments: Any) -> Any:
    """Return the result of a step; one that fails has printed why, and ends this process with its exit code."""
    command = step_command(step, **arguments)
    result = subprocess.run(command, stdout=subprocess.PIPE, env=tool_environment(), check=False)
    if result.returncode != 0:
        sys.exit(result.returncode)
    return parse_json(result.stdout)


def our_command(backend: str, job: Job, output: str, workers: int) -> list[str]:
    return [
        *(sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py")),
        *("--input", job.shards, "--text-key", job.text_key, "--output-prefix", f"{output}/corpus"),
        *("--tokenizer-model", job.tokenizer_model, "--tokenizer-backend", backend, "--workers", str(workers)),
    ]


def peer_command(step: str, job: Job, output: str, workers: int) -> list[str]:
    shared = {"shards": job.shards, "text_key": job.text_key, "tokenizer_json": job.tokenizer_json}
    return step_command(step, **shared, output=output, workers=workers)


def megatron_command(job: Job, output: str, workers: int) -> list[str]:
    return [
        *(sys.executable, job.megatron_lm, "--input", f"{job.shards}.jsonl", "--json-keys", job.text_key),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(Path(job.tokenizer_json).parent)),
        *("--tokenizer-hf-no-include-special-tokens", "--output-prefix", f"{output}/corpus", "--workers", str(workers)),
        # Its last statement shows what other runs have measured, and fails where there are none.
        *("--performance-dir", f"{job.shards}.performance"),
    ]


TOOLS = {
    "ours-fast": Tool(partial(our_command, "fast")),
    "ours-plain": Tool(partial(our_command, "reference")),
    "datatrove": Tool(partial(peer_command, "datatrove"), ("datatrove",), adds_special_tokens=True),
    "datasets": Tool(partial(peer_command, "datasets"), ("datasets", "transformers"), adds_special_tokens=True),
    "megatron": Tool(megatron_command, packages=("transformers",)),
}


def run_in_turns(
    turns: Sequence[tuple[str, int]], job: Job, shards: Sequence[str], *, folder: str, rounds: int, title: str = "round"
) -> list[Measured]:
    """Run every tool once a round, and compare what they have written."""
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory(dir=folder) as copies:
        for number, shard in enumerate(shards):  # in one folder, in their order, as all tools can read them
            shutil.copyfile(shard, Path(copies, f"{number:06d}.parquet"))
        if any(tool == "megatron" for tool, _ in turns):
            run_step("json-lines", shards=copies, text_key=job.text_key)
        for number, (tool, workers) in in_turns(turns, rounds=rounds):
            run = measure(tool, replace(job, shards=copies), workers, folder)
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
    """Run one tool on as many cores as it has workers, and count what it has written.

    Raises:
        DataError: The tool fails.
    """
    tool = TOOLS[name]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output, log = Path(scratch, "output"), Path(scratch, "log")
        output.mkdir()
        code, measured = run_measured(tool.command(job, str(output), workers), cores=workers, log=log, scratch=scratch)
        if code != 0:
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise DataError(f"{name} ended with exit code {code}, so nothing is compared. Its output ends in:\n{end}")
        special_tokens = job.special_tokens if tool.adds_special_tokens else 0
        counted = run_step("count", output=str(output), special_tokens=special_tokens)
    return Measured(name, workers, **measured, **counted)


def run_measured(command: list[str], *, cores: int, log: Path, scratch: str) -> tuple[int, dict[str, Any]]:
    """Return exit code, wall seconds, CPU seconds and peak memory of a command on the first cores that may be used."""
    allowed = os.sched_getaffinity(0)
    with log.open("wb") as stream:
        os.sched_setaffinity(0, sorted(allowed)[:cores])  # which the command inherits
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=tool_environment(scratch)
        )
        os.sched_setaffinity(0, allowed)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:  # Ctrl-C: the tool must not run on
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
    """Return variables for one thread per process, nothing from the network, and no cache of an earlier run."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",  # Arrow obeys it too
        "ARROW_IO_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return environment | ({"HF_HOME": f"{scratch}/cache", "TMPDIR": scratch} if scratch else {})


def verify(runs: Sequence[Measured]) -> None:
    """Raise if runs did not do the same work.

    Raises:
        DataError: Tools wrote different numbers of tokens, or different ids where they wrote nothing but ids.
    """
    counts = [(run.name, f"{run.tokens:,}") for run in runs]
    hashes = [(run.name, run.ids_sha256[:12]) for run in runs if run.ids_sha256]
    for what, found in (("numbers of tokens", counts), ("ids, by sha256", hashes)):
        if len({value for _, value in found}) > 1:
            each = ", ".join(f"{name} {value}" for name, value in dict.fromkeys(found))
            raise DataError(
                f"the tools wrote different {what}: {each}. Only tools that do the same work are compared; leave out "
                "the one that is wrong (--tools)."
            )


def summarise(runs: Sequence[Measured], *, text_bytes: int) -> list[dict[str, Any]]:
    """Return one row per tool and number of workers: medians, and the peers' wall time as a multiple of the tool's."""
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
        peers = {peer: wall.get((peer, workers)) for peer in COMPARED}
        rows.append(row | {f"x {peer}": theirs and theirs / seconds for peer, theirs in peers.items()})
    return rows


if __name__ == "__main__":
    run_command(main)
