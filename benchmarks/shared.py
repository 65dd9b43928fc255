"""Code shared by the benchmarks: options, turns, the report, and a generated corpus.

Imports no large library, so that a benchmark that starts tools as processes has a small peak memory itself.
"""

import argparse
import datetime
import json
import math
import os
import platform
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron_neobert.cli import Parser
from megatron_neobert.runtime.environment import installed_packages

T = TypeVar("T", bound=Hashable)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# RefinedWeb has mean / median = 640 / 368 tokens, which is exp(sigma^2 / 2) for a log-normal distribution.
SIGMA = math.sqrt(2 * math.log(640 / 368))


def build_parser(documentation: str | None, *, rounds: int = 0, also: Iterable[str] = ()) -> Parser:
    """Return a parser with --output and, unless `rounds` is 0, --rounds with default `rounds`.

    Args:
        documentation: Docstring of the benchmark. The first line becomes the description.
        also: Flags of another parser, which are not reported as unknown.
    """
    parser = Parser((documentation or "").partition("\n")[0], also=also)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON to this file")
    if rounds:
        parser.add_argument(
            "--rounds", type=positive, default=rounds, metavar="N", help="measurements of each row (%(default)s)"
        )
    return parser


def positive(text: str) -> int:
    """Parse a whole number of at least 1, as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def measure_in_turns(subjects: Iterable[T], measure: Callable[[int, T], Any], *, rounds: int) -> list[dict[T, Any]]:
    """Call `measure(round, subject)` for each round (1-based) and subject. Return subject -> result for each round.

    The order is reversed after each round, so that slow changes of speed affect all subjects alike.
    """
    order, results = list(subjects), []
    for number in range(1, rounds + 1):
        results.append({subject: measure(number, subject) for subject in order})
        order.reverse()
    return results


def report(
    path: Path | None, packages: Iterable[str], tables: dict[str, Sequence[dict[str, Any]]], **figures: Any
) -> None:
    """Print facts about the machine and all tables. Unless `path` is None, write them and `figures` there as JSON.

    The facts about the machine include the versions of installed `packages`, and `figures["machine"]`.
    """
    machine = describe_machine(packages) | figures.pop("machine", {})
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for rows in filter(None, tables.values()):
        print_table(rows)
    if path is not None:
        path.write_text(json.dumps({"machine": machine, **tables, **figures}, indent=1) + "\n", encoding="utf-8")


def describe_machine(packages: Iterable[str]) -> dict[str, str]:
    """Return "cpu", "cores" (usable by this process), "date", "python", and the versions of installed `packages`."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    installed = installed_packages()
    return {
        "cpu": f"{len(models)} x {models[0]}" if models else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{package: installed[package] for package in packages if package in installed},
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a text table. The first row's keys are the columns; all rows must contain these keys."""

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    cells = [list(rows[0]), *([cell(row[name]) for name in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print(" | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def write_corpus(folder: Path, *, documents: int, median_tokens: int, longest: int, vocab_size: int) -> tuple[str, str]:
    """Write random documents to the existing `folder`, identical in every call, and preprocess them.

    Return the corpus prefix and the path of the vocabulary, which contains `vocab_size` tokens, special tokens
    included. Each word is one token. Lengths are log-normal with median `median_tokens`, cut at `longest`.
    """
    from megatron_neobert.data.preprocessing.run import PreprocessSettings, plan_preprocessing, preprocess

    rng = random.Random(0)
    words = [f"w{number}" for number in range(vocab_size - len(SPECIAL))]
    vocabulary, texts = folder / "vocab.txt", folder / "texts.jsonl"
    vocabulary.write_text("".join(f"{word}\n" for word in (*SPECIAL, *words)), encoding="utf-8")
    with texts.open("w", encoding="utf-8") as stream:
        for _ in range(documents):
            length = min(int(rng.lognormvariate(math.log(median_tokens), SIGMA)) + 1, longest)
            stream.write(json.dumps({"content": " ".join(rng.choices(words, k=length))}) + "\n")
    settings = PreprocessSettings((str(texts),), output_prefix=str(folder / "c"), tokenizer_model=str(vocabulary))
    preprocess(plan_preprocessing(settings))
    return str(folder / "c_content_document"), str(vocabulary)
