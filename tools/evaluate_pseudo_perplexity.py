"""Command: pseudo-perplexity of encoders against the length of texts.

    python tools/evaluate_pseudo_perplexity.py --model model other/bert --data wikipedia/*.parquet --text-key text \
        --output results --positions-per-doc 128 --documents-per-bin 200

Masks one token at a time, never those that the tokenizer adds. Writes OUTPUT/MODEL/pseudo_perplexity.json, one line
per document beside it, and the curves of all models as OUTPUT/pseudo_perplexity.csv and .png. Started again, it
resumes; documents measured with other settings are kept apart.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import CommandParser, ConfigError, run_command
from megatron_neobert.runtime.atomic_files import require_folder

LENGTH_BINS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCH_TOKENS = 16384
SECONDS_BETWEEN_LINES = 30.0  # where there is no terminal to draw a bar on


def main() -> None:
    """Reads the arguments, measures one model after the other, and draws their curves."""
    arguments = _parse()
    _check(arguments)
    _evaluate(arguments)


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("--model", nargs="+", required=True, type=Path, metavar="DIR", help="Hugging Face folders")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="parquet, Arrow, JSON or text; globs and folders as well",
    )
    parser.add_argument("--text-key", default="content", metavar="KEY", help="column or key (default: %(default)s)")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--positions-per-doc", type=int, metavar="K", help="mask K tokens of each document, drawn (default: all)"
    )
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="cut documents after N tokens (default: the model's longest input)"
    )
    parser.add_argument(
        "--min-length",
        type=int,
        default=16,
        metavar="N",
        help="leave out shorter documents (default: %(default)s tokens)",
    )
    parser.add_argument(
        "--length-bins",
        type=int,
        nargs="+",
        default=list(LENGTH_BINS),
        metavar="N",
        help=f"upper ends, in tokens, of the lengths that are averaged (default: {' '.join(map(str, LENGTH_BINS))})",
    )
    parser.add_argument(
        "--documents-per-bin", type=int, metavar="N", help="only the first N of each length (default: all)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N documents (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of --positions-per-doc (default: %(default)s)")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=BATCH_TOKENS,
        metavar="N",
        help="of one batch, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    parser.add_argument(
        "--attention", metavar="NAME", help="eager, sdpa, flash_attention_2 (default: transformers' choice)"
    )
    return parser.parse_args()


def _check(arguments: argparse.Namespace) -> None:
    problems = [
        f"--{name.replace('_', '-')} {value} is not a number of tokens or documents; give at least 1."
        for name in ("positions_per_doc", "max_length", "min_length", "documents_per_bin", "limit", "batch_tokens")
        if (value := getattr(arguments, name)) is not None and value < 1
    ]
    bins = arguments.length_bins
    if bins[0] < 1 or any(low >= high for low, high in pairwise(bins)):
        problems.append(f"--length-bins {' '.join(map(str, bins))} must be positive and increase.")
    names = [folder.resolve().name for folder in arguments.model]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(
            f"--model names {names.count(name)} folders called {name}, and results are kept by that name; measure them "
            "into different --output folders, or rename them."
        )
    if problems:
        raise ConfigError(problems)
    for folder in arguments.model:
        require_folder("--model", folder, holding="config.json")
    from megatron_neobert.data.shards.find import find_shards

    find_shards(arguments.data)  # refuses what is not there, before seconds of imports


def _evaluate(arguments: argparse.Namespace) -> None:
    import torch

    from megatron_neobert.data.shards.records import ReadSettings
    from megatron_neobert.evaluation.encoders import LoadOptions, choose_device
    from megatron_neobert.evaluation.pseudo_perplexity.documents import Choice
    from megatron_neobert.evaluation.pseudo_perplexity.run import Evaluation, evaluate, write_curves

    evaluation = Evaluation(
        inputs=tuple(arguments.data),
        read=ReadSettings(text_key=arguments.text_key),
        choice=Choice(
            max_length=arguments.max_length,
            min_length=arguments.min_length,
            limit=arguments.limit,
            documents_per_bin=arguments.documents_per_bin,
            length_bins=tuple(arguments.length_bins),
            positions_per_document=arguments.positions_per_doc,
            seed=arguments.seed,
        ),
        options=LoadOptions(
            dtype=getattr(torch, arguments.dtype),
            device=choose_device(arguments.device),
            attention=arguments.attention,
        ),
        batch_tokens=arguments.batch_tokens,
    )
    outcomes = []
    for folder in arguments.model:
        outcome = evaluate(folder, arguments.output, evaluation, _show_progress)
        error = "" if not outcome.standard_error else f" ± {outcome.standard_error:.3g} (tokens that were not drawn)"
        found = f"pseudo-perplexity {outcome.pseudo_perplexity:.6g}{error}, {outcome.documents:,} documents"
        print(f"{outcome.name}: {found}", flush=True)
        outcomes.append(outcome)
    write_curves(arguments.output, outcomes)
    print(f"wrote {arguments.output / 'pseudo_perplexity.csv'} and .png")


@contextmanager
def _show_progress(name: str, total_tokens: int) -> Iterator[Callable[[int], None]]:
    """Tokens a second and the time that remains: as a bar on a terminal, else as a line now and then."""
    from tqdm import tqdm

    if total_tokens == 0:
        print(f"{name}: all documents were measured before", file=sys.stderr)
    with tqdm(total=total_tokens, desc=name, unit=" tokens", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        started = shown = time.monotonic()
        done = 0

        def add_line(tokens: int) -> None:
            nonlocal done, shown
            done, now = done + tokens, time.monotonic()
            if now - shown < SECONDS_BETWEEN_LINES and done < total_tokens:
                return
            shown, rate = now, done / (now - started)
            print(
                f"{name}: {done:,} of {total_tokens:,} tokens | {rate:,.0f} tokens/s | "
                f"{(total_tokens - done) / rate:,.0f} s left",
                file=sys.stderr,
                flush=True,
            )

        yield add_line if bar.disable else bar.update


if __name__ == "__main__":
    run_command(main)
