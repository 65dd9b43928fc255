"""How many planted near-duplicates are found, and what does it cost, beside datatrove's MinHash?

    python benchmarks/benchmark_duplicates.py --input 'shards/*.parquet' --tokenizer-model vocab.txt

Texts are read once, copies with changed words are planted among them, and each tool lists what it would drop, with 14
bands of 8 rows and n-grams of 5. datatrove's are of words and of the raw text; this project's are of a corpus's token
ids, so preprocessing, which training needs anyway, is a row of its own. The tools take turns, on one core, start-up
included. Peak memory is that of the whole process tree. MB are 10^6 bytes.
"""

import argparse
import ctypes
import importlib.util
import random
import statistics
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from benchmarks.benchmark_preprocessing import PR_SET_CHILD_SUBREAPER, REPOSITORY, run_measured, step_command
from benchmarks.shared import describe_machine, in_turns, positive, print_table, write_figures
from megatron_neobert.cli import Parser
from megatron_neobert.errors import DataError, MissingInputError, run_command

CHANGED = (0.0, 0.005, 0.01, 0.02, 0.04)  # shares of a copy's words that are others
SHORTEST_WORDS = 50  # of a shorter text one word is more than 2 %
PACKAGES = ("numpy", "datatrove", "spacy", "nanotoken")
OURS, BANDS_ALONE, PREPROCESSING, DATATROVE = "ours", "ours, bands alone", "ours, preprocessing", "datatrove"


def main() -> None:
    arguments = parse_arguments()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    tools = [PREPROCESSING, OURS, BANDS_ALONE]
    if missing := [name for name in ("datatrove", "spacy") if importlib.util.find_spec(name) is None]:
        print(f"datatrove is left out, without {' and '.join(missing)}: pip install 'datatrove>=0.9' spacy")
    else:
        tools.append(DATATROVE)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        planted = plant(arguments.input, arguments.text_key, folder / "shards")
        print(f"{planted['documents']:,} documents, {len(planted['copies']):,} of them copies", flush=True)
        runs = []
        for number, tool in in_turns(tools, rounds=arguments.rounds):
            runs.append(measure(tool, arguments, folder, planted))
            print(f"round {number} | {tool} | {runs[-1]['wall s']:.1f} s, {runs[-1]['CPU s']:.1f} cpu-s", flush=True)
    rows = [summarise([run for run in runs if run["tool"] == tool]) for tool in tools]
    print_table(rows)
    figures = {"machine": describe_machine(PACKAGES), "documents": planted["documents"], "table": rows, "runs": runs}
    write_figures(arguments.output, figures)


def parse_arguments() -> argparse.Namespace:
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, metavar="FILE", help="parquet files")
    add("--tokenizer-model", required=True, metavar="PATH", help="as of preprocess_data.py")
    add("--text-key", default="content", help="column of the text (%(default)s)")
    add("--rounds", type=positive, default=2, metavar="N", help="runs of each, of which the median counts (2)")
    add("--output", type=Path, metavar="FILE", help="write all figures there as JSON")
    return parser.parse_args()


def plant(shards: Sequence[Path], text_key: str, folder: Path) -> dict[str, Any]:
    """One shard of the texts and, of every fifth, a copy with some of its words changed, all in random order.

    Returns:
        documents: Number of rows.
        copies: Row of the original, row of the copy, and the share of changed words.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if absent := [shard for shard in shards if not shard.is_file()]:
        raise MissingInputError(f"--input {absent[0]}: no such file; name parquet files.")
    rng = random.Random(0)
    texts = [text for shard in shards for text in pq.read_table(shard, columns=[text_key])[text_key].to_pylist()]
    texts = [text for text in texts if len(text.split()) >= SHORTEST_WORDS]
    vocabulary = sorted({word for text in texts[:1000] for word in text.split()})
    sources = rng.sample(range(len(texts)), len(texts) // 5)
    shares = [CHANGED[number % len(CHANGED)] for number in range(len(sources))]
    copies = []
    for source, share in zip(sources, shares, strict=True):
        words = texts[source].split()
        for place in rng.sample(range(len(words)), round(share * len(words))):
            words[place] = rng.choice(vocabulary)
        copies.append(" ".join(words))
    order = rng.sample(range(len(texts) + len(copies)), len(texts) + len(copies))
    row = {number: place for place, number in enumerate(order)}
    both = [*texts, *copies]
    folder.mkdir()
    pq.write_table(pa.table({"text": [both[number] for number in order]}), folder / "shard.parquet")
    pairs = [(row[source], row[len(texts) + place], shares[place]) for place, source in enumerate(sources)]
    return {"documents": len(both), "copies": pairs}


def measure(tool: str, arguments: argparse.Namespace, folder: Path, planted: dict[str, Any]) -> dict[str, Any]:
    """Seconds and memory of one run of a tool, and what it has found."""
    prefix, output = folder / "corpus", folder / "drop"
    find = [sys.executable, "-m", "megatron_neobert", "find-duplicates", f"{prefix}_text_document"]
    find += ["--output", str(output), "--overwrite"]
    commands = {
        PREPROCESSING: [
            *(sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py"), "--input", str(folder / "shards")),
            *("--output-prefix", str(prefix), "--text-key", "text", "--tokenizer-model", arguments.tokenizer_model),
            "--overwrite",
        ],
        OURS: find,
        BANDS_ALONE: [*find, "--threshold", "0.01"],
        DATATROVE: step_command(
            "datatrove-duplicates", shards=str(folder / "shards"), output=str(folder / "datatrove")
        ),
    }
    log = folder / "log"
    code, measured = run_measured(commands[tool], cores=1, log=log, scratch=str(folder))
    if code != 0:
        raise DataError(f"{tool} ended with exit code {code}. Its output ends in:\n{log.read_text()[-2000:]}")
    figures = {"wall s": measured["wall_seconds"], "CPU s": measured["cpu_seconds"]}
    figures |= {"peak MB": measured["peak_bytes"] / 1e6}
    if tool == PREPROCESSING:
        return {"tool": tool, **figures}
    dropped = read_datatrove(folder) if tool == DATATROVE else read_ours(output, f"{prefix}_text_document")
    return {"tool": tool, **figures, **judge(dropped, planted["copies"])}


def judge(dropped: set[int], copies: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """Share of the pairs of which one is dropped, by changed words; share of the dropped that stand for a pair."""
    found = {pair for pair in copies if pair[0] in dropped or pair[1] in dropped}
    recalls = {}
    for share in CHANGED:
        own = [pair for pair in copies if pair[2] == share]
        recalls[f"{share:.1%} changed"] = len(found.intersection(own)) / len(own)
    return {**recalls, "precision": len(found) / len(dropped) if dropped else 1.0}


def read_ours(output: Path, prefix: str) -> set[int]:
    import numpy as np

    from megatron_neobert.data.corpus.drop_list import read_drop_list
    from megatron_neobert.data.corpus.reader import Corpus

    corpus = Corpus(prefix)
    _, mask = read_drop_list(output, corpus.manifest, corpus.prefix)
    return set(np.flatnonzero(np.unpackbits(mask, count=len(corpus), bitorder="little")).tolist())


def read_datatrove(folder: Path) -> set[int]:
    (file,) = (folder / "datatrove" / "remove").iterdir()
    return {number for (number,) in struct.iter_unpack("<I", file.read_bytes())}


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of seconds, the largest memory; what is found is the same in every run."""
    columns = ["precision", *(f"{share:.1%} changed" for share in CHANGED)]
    row = {
        "tool": runs[0]["tool"],
        **{name: statistics.median(run[name] for run in runs) for name in ("wall s", "CPU s")},
    }
    row["peak MB"] = max(run["peak MB"] for run in runs)
    return row | {name: runs[0].get(name) for name in columns}


if __name__ == "__main__":
    run_command(main)
