"""Measure the speed and the memory of tokenising input files, in comparison with other tools.

    python benchmarks/benchmark_preprocessing.py --input 'texts/*.parquet' --tokenizer-model vocab.txt

Each run of a tool is a new process, with start-up included, on as many cores as it has workers. The tools take turns on
the same parquet files with the same vocabulary. The table is printed only if all tools wrote the same number of tokens,
and the same ids if their files contain only the ids of the text. MB are 10^6 bytes; peak memory is that of the tool's
largest process.

No package contains Megatron-LM's tool: --megatron-lm names the file in a checkout. The tool needs the rest of
Megatron-LM, which megatron-core 0.19 includes, and reads JSON lines, which are written for it first.

The steps that need large libraries (STEPS) are processes of their own, because the peak memory of a process that the
benchmark starts is at least the benchmark's memory at that time.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from benchmarks.shared import build_parser, measure_in_turns, positive, report
from megatron_neobert.errors import ConfigError, DataError, run_command
from megatron_neobert.text import counted, parse_json

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("tokenizers", "nanotoken", "pyarrow", "numpy", "datatrove", "datasets", "transformers")
OURS = {"ours-fast": "fast", "ours-plain": "reference"}  # tool -> --tokenizer-backend
# Tool of others -> packages that it needs.
NEEDED = {"datatrove": ("datatrove",), "datasets": ("datasets", "transformers"), "megatron": ("transformers",)}
TOOLS = (*OURS, *NEEDED)
ADD_SPECIAL_TOKENS = ("datatrove", "datasets")  # tools that add special tokens to each document
BATCH_DOCUMENTS = 1000  # for the other tools; from 128 to 5,000, their speed hardly changes but their memory does
DTYPE_BYTES = {4: 4, 8: 2}  # by Megatron's codes of int32 and uint16


@dataclass(frozen=True)
class Measured:
    """Figures of a run of one tool."""

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


def main() -> None:
    """Measure every tool in turns, print the table, and write the figures to --output if given."""
    if sys.argv[1:2] == ["step"]:
        print(json.dumps(STEPS[sys.argv[2]](**parse_json(sys.argv[3]))))
        return
    parser = build_parser(__doc__, rounds=2)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="parquet files: paths, globs or folders")
    add("--tokenizer-model", required=True, metavar="PATH", help="tokenizer, as for neobert preprocess")
    add("--text-key", default="content", help="column of the text (%(default)s)")
    add("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="default: all")
    add("--megatron-lm", default="", metavar="FILE", help="tools/preprocess_data.py in a checkout of Megatron-LM")
    add("--workers", type=positive, nargs="+", default=[1], metavar="N", help="processes, one core each (1)")
    arguments = parser.parse_args()
    tools = available_tools(arguments.tools, megatron_lm=arguments.megatron_lm)
    runs: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        inputs = {"patterns": arguments.input, "text_key": arguments.text_key, "model": arguments.tokenizer_model}
        job = run_step("prepare", **inputs, folder=folder, json_lines="megatron" in tools)
        job["megatron_lm"] = arguments.megatron_lm
        corpus = {name: job[name] for name in ("documents", "text_bytes")}
        print("{documents:,} documents, {text_bytes:,} bytes of text".format(**corpus), flush=True)

        def take_turn(number: int, turn: tuple[str, int]) -> Measured:
            run = measure(*turn, job, folder)
            runs.append(run)
            print(
                f"round {number} | {run.name} | {run.wall_seconds:.2f} s, {run.cpu_seconds:.2f} cpu-s | "
                f"peak {run.peak_bytes / 1e6:,.0f} MB | {run.tokens:,} tokens",
                flush=True,
            )
            verify(runs)
            return run

        turns = [(tool, workers) for workers in arguments.workers for tool in tools]
        rounds = measure_in_turns(turns, take_turn, rounds=arguments.rounds)
    table = summarise({turn: [runs[turn] for runs in rounds] for turn in turns}, text_bytes=corpus["text_bytes"])
    figures = {"corpus": corpus, "tokens": runs[0].tokens, "runs": [asdict(run) for run in runs]}
    report(arguments.output, PACKAGES, {"table": table}, **figures)
    same = sorted({run.tool for run in runs if run.ids_sha256})
    print(f"all wrote {runs[0].tokens:,} tokens" + (f"; the same ids: {', '.join(same)}" if len(same) > 1 else ""))


def available_tools(names: Sequence[str], *, megatron_lm: str) -> list[str]:
    """Return the tools in `names` that can run, and print what the others need. Raise ConfigError if none can run."""
    available = []
    for name in names:
        if missing := [package for package in NEEDED.get(name, ()) if importlib.util.find_spec(package) is None]:
            print(f"skipping {name}, which needs {' and '.join(missing)}: pip install 'megatron-neobert[benchmark]'")
        elif name == "megatron" and not megatron_lm:
            print(f"skipping {name}, which needs --megatron-lm")
        else:
            available.append(name)
    if not available:
        raise ConfigError(f"none of {', '.join(names)} can run; install one of them, or name others after --tools.")
    return available


# ---- measurement


def step_command(step: str, **arguments: Any) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "step", step, json.dumps(arguments)]


def run_step(step: str, **arguments: Any) -> Any:
    """Run a step in a new process and return the step's result. If the step fails, exit with the step's exit code."""
    command = step_command(step, **arguments)
    result = subprocess.run(command, stdout=subprocess.PIPE, env=tool_environment(), check=False)
    if result.returncode != 0:
        sys.exit(result.returncode)
    return parse_json(result.stdout)


def measure(name: str, workers: int, job: dict[str, Any], folder: str) -> Measured:
    """Run a tool on `workers` cores, and return the tool's figures. Its output in `folder` is deleted.

    Raise DataError if the tool fails.
    """
    allowed = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output, log = Path(scratch, "output"), Path(scratch, "log")
        output.mkdir()
        with log.open("wb") as stream:
            os.sched_setaffinity(0, sorted(allowed)[:workers])  # the tool inherits the cores
            started = time.perf_counter()
            process = subprocess.Popen(
                command_of(name, job, str(output), workers),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=tool_environment(scratch),
            )
            os.sched_setaffinity(0, allowed)
            try:
                _, status, usage = os.wait4(process.pid, 0)
            except BaseException:
                process.kill()  # after Ctrl-C, the tool must not continue
                raise
            wall_seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise DataError(
                f"{name} ended with exit code {process.returncode}; fix or exclude it (--tools). Its last output:\n"
                f"{end}"
            )
        special_tokens = job["special_tokens"] if name in ADD_SPECIAL_TOKENS else 0
        written = run_step("count", output=str(output), special_tokens=special_tokens)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Measured(name, workers, wall_seconds, cpu_seconds, peak_bytes=usage.ru_maxrss * 1024, **written)


def tool_environment(scratch: str | None = None) -> dict[str, str]:
    """Return os.environ with this repository on PYTHONPATH, one thread per process and no downloads from the Hub.

    If `scratch` is given, caches and temporary files are written to this folder.
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
    """Raise DataError if `tokens` differs between runs, or if `ids_sha256` differs between runs that have a hash."""
    counts = [(run.name, f"{run.tokens:,}") for run in runs]
    hashes = [(run.name, run.ids_sha256[:12]) for run in runs if run.ids_sha256]
    for compared, values in (("numbers of tokens", counts), ("ids, by sha256", hashes)):
        if len({value for _, value in values}) > 1:
            by_tool = ", ".join(f"{name} {value}" for name, value in dict.fromkeys(values))
            raise DataError(
                f"the tools wrote different {compared}: {by_tool}. Only tools that do the same work are compared; "
                "exclude the wrong tool (--tools)."
            )


def summarise(runs: dict[tuple[str, int], list[Measured]], *, text_bytes: int) -> list[dict[str, Any]]:
    """Return a row for each tool and worker count: medians, peak memory, and speed-up over each tool in NEEDED."""
    wall = {key: statistics.median(run.wall_seconds for run in group) for key, group in runs.items()}
    rows = []
    for (tool, workers), group in runs.items():
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
        ratios = {f"x {peer}": wall[peer, workers] / seconds if (peer, workers) in wall else None for peer in NEEDED}
        rows.append(row | ratios)
    return rows


def command_of(tool: str, job: dict[str, Any], output: str, workers: int) -> list[str]:
    """Return the command that tokenizes a job's files and writes to the folder `output`."""
    if tool in OURS:
        return [
            *(sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py")),
            *("--input", job["folder"], "--text-key", job["text_key"], "--output-prefix", f"{output}/corpus"),
            *("--tokenizer-model", job["tokenizer_model"], "--tokenizer-backend", OURS[tool]),
            *("--workers", str(workers)),
        ]
    if tool != "megatron":
        inputs = {name: job[name] for name in ("folder", "text_key", "tokenizer_json")}
        return step_command(tool, **inputs, output=output, workers=workers)
    return [
        *(sys.executable, job["megatron_lm"], "--input", f"{job['folder']}.jsonl", "--json-keys", job["text_key"]),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(Path(job["tokenizer_json"]).parent)),
        *("--tokenizer-hf-no-include-special-tokens", "--output-prefix", f"{output}/corpus", "--workers", str(workers)),
        # The tool ends with a summary of earlier runs, and fails if there is none.
        *("--performance-dir", f"{job['folder']}.performance"),
    ]


# ---- steps


def prepare(patterns: Sequence[str], text_key: str, model: str, folder: str, json_lines: bool) -> dict[str, Any]:
    """Copy input files to `folder`/inputs, and write a tokenizer without special added tokens for the other tools.

    If `json_lines`, also write the texts for Megatron-LM's tool. Return the job, which all tools use.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    import tokenizers

    from megatron_neobert.data.inputs.find import find_inputs
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    copies = Path(folder, "inputs")
    copies.mkdir()
    documents = text_bytes = 0
    with Path(f"{copies}.jsonl").open("w", encoding="utf-8") as lines:
        for number, file in enumerate(find_inputs(patterns)):
            copy = shutil.copyfile(file, copies / f"{number:06d}.parquet")
            for batch in pq.ParquetFile(copy).iter_batches(columns=[text_key]):
                documents += batch.num_rows
                text_bytes += pc.sum(pc.binary_length(batch[text_key])).as_py() or 0
                if json_lines:
                    lines.writelines(json.dumps({text_key: text}) + "\n" for text in batch[text_key].to_pylist())
    Path(f"{copies}.performance").mkdir()
    Path(f"{copies}.performance", "1_workers.json").write_text('{"1": [1.0]}', encoding="utf-8")
    load_tokenizer(model).save_tokenizer_files(Path(folder, "tokenizer"), model_max_length=512)
    path = Path(folder, "tokenizer", "tokenizer.json")
    content = parse_json(path.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return {
        "folder": str(copies),
        "documents": documents,
        "text_bytes": text_bytes,
        "text_key": text_key,
        "tokenizer_model": str(Path(model).absolute()),
        "tokenizer_json": str(path),
        "special_tokens": len(tokenizers.Tokenizer.from_file(str(path)).encode("")),
    }


def run_datatrove(folder: str, text_key: str, tokenizer_json: str, output: str, workers: int) -> None:
    """Tokenize parquet files in `folder` with datatrove. Write .bin and .idx to `output`, logs to logs/ beside it."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import MegatronDocumentTokenizer

    reader = ParquetReader(folder, text_key=text_key, read_metadata=False, batch_size=BATCH_DOCUMENTS)
    # Without an end-of-sequence token, only the tokenizer's post-processor adds special tokens.
    writer = MegatronDocumentTokenizer(
        output, tokenizer_name_or_path=tokenizer_json, eos_token=None, batch_size=BATCH_DOCUMENTS
    )
    logs = str(Path(output).with_name("logs"))
    LocalPipelineExecutor([reader, writer], tasks=workers, workers=workers, logging_dir=logs).run()


def run_datasets(folder: str, text_key: str, tokenizer_json: str, output: str, workers: int) -> None:
    """Tokenize parquet files in `folder` with `datasets`, like NeoBERT's authors but untruncated. Save to `output`."""
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_json)
    dataset = load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train")

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch[text_key], return_token_type_ids=False)

    processes = workers if workers > 1 else None
    encoded = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, num_proc=processes)
    encoded.save_to_disk(output, num_proc=processes)


def count(output: str, special_tokens: int) -> dict[str, Any]:
    """Count documents and tokens in the folder `output`: Megatron's .bin and .idx files, or files of `datasets`.

    The `special_tokens` around each document are not counted. "ids_sha256" is the hash of all .bin files, or None if
    the documents contain special tokens.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    documents = tokens = 0
    digest = hashlib.sha256()
    for index in sorted(Path(output).glob("*.idx")):
        _, _, code, number = struct.unpack("<9sQBQ", index.read_bytes()[:26])
        lengths = np.fromfile(index, dtype=np.int32, count=number, offset=34)  # after the 34-byte header
        ids = index.with_suffix(".bin").read_bytes()
        assert len(ids) == DTYPE_BYTES[code] * int(lengths.sum()), index
        digest.update(ids)
        documents += number
        tokens += int(lengths.sum())
    for path in sorted(Path(output).glob("*.arrow")):
        with pa.memory_map(str(path)) as source:
            for batch in pa.ipc.open_stream(source):
                documents += batch.num_rows
                tokens += pc.sum(pc.list_value_length(batch["input_ids"])).as_py() or 0
    sha256 = None if special_tokens else digest.hexdigest()
    return {"documents": documents, "tokens": tokens - special_tokens * documents, "ids_sha256": sha256}


STEPS: dict[str, Callable[..., Any]] = {
    "prepare": prepare,
    "datatrove": run_datatrove,
    "datasets": run_datasets,
    "count": count,
}

if __name__ == "__main__":
    run_command(main)
