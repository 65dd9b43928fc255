"""Command: how many tokens per second do encoders read, at which length, with which batch size?

    neobert evaluate throughput --model DIR [DIR...] --output DIR

Measures the forward pass of the backbone and, with --backward, the masked-language-model loss with its gradients. The
batch size grows until memory ends; models take turns step by step. Tokens are random and those of documents alone:
padding is not counted. Weights and activations have the dtype that is named, without autocast. Writes
OUTPUT/<model>/throughput.json, and of all models throughput.csv, throughput.md and a figure for each kind of passes.
The same command resumes after a kill; more lengths or batch sizes may be added.
"""

import argparse
from pathlib import Path
from typing import Any

from megatron_neobert.errors import CommandParser, ConfigError, positive
from megatron_neobert.runtime.atomic_files import name_models

LENGTHS = (512, 1024, 2048, 4096, 8192)
BATCH_SIZES = tuple(2**power for power in range(10))
CPU_MAX_TOKENS = 16_384


def main() -> None:
    """Reads the arguments, measures and writes."""
    arguments = _parse()
    _run(arguments, name_models(arguments.model))


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--model", required=True, nargs="+", type=Path, metavar="DIR", help="Hugging Face folders of encoders")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for results; created if missing")
    add("--lengths", nargs="+", type=positive, default=LENGTHS, metavar="N", help="tokens (512 to 8192)")
    add(
        "--batch-sizes",
        nargs="+",
        type=positive,
        default=BATCH_SIZES,
        metavar="N",
        help="documents (1, 2, ... 512)",
    )
    add("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=["float32"], help="default float32")
    add("--attention", nargs="+", default=[None], metavar="NAME", help="sdpa, eager, flash_attention_2, ...; default: "
        "what transformers chooses")  # fmt: skip
    add("--layout", choices=("padded", "packed", "both"), default="padded", help="padded: a document per row; packed: "
        "documents end to end, where the model takes them (default: %(default)s)")  # fmt: skip
    add("--backward", action="store_true", help="measure forward and backward of the masked-language-model loss too")
    add("--steps", type=positive, default=20, metavar="N", help="timed, of each (%(default)s)")
    add("--warmup", type=positive, default=3, metavar="N", help="steps before, not timed (%(default)s)")
    add("--lengths-distribution", choices=("full", "web"), default="full", help="full: every document has the length; "
        "web: log-normal as web pages, cut at the length (default: %(default)s)")  # fmt: skip
    add("--max-tokens", type=positive, metavar="N", help="leave out larger batches (documents x length); default: no "
        f"limit on a GPU; on a CPU {CPU_MAX_TOKENS:,} or the longest length")  # fmt: skip
    add("--device", metavar="NAME", help="default: cuda if there is one, else cpu")
    add("--seed", type=int, default=0, metavar="N", help="of tokens and lengths (%(default)s)")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, folders: dict[str, Path]) -> None:
    from tqdm import tqdm

    from megatron_neobert.evaluation.encoders import choose_device
    from megatron_neobert.evaluation.records import hold
    from megatron_neobert.evaluation.throughput.models import load_models
    from megatron_neobert.evaluation.throughput.run import Sweep, describe, measure, open_log, summarise, write_results

    device = choose_device(arguments.device)
    longest = max(arguments.lengths)
    limit = arguments.max_tokens or (None if device.type == "cuda" else max(CPU_MAX_TOKENS, longest))
    if limit is not None and longest > limit:
        raise ConfigError(f"--lengths {longest} is over --max-tokens {limit}; leave it out or raise the limit.")
    sweep = Sweep(
        lengths=tuple(arguments.lengths),
        batch_sizes=tuple(arguments.batch_sizes),
        steps=arguments.steps,
        warmup=arguments.warmup,
        distribution=arguments.lengths_distribution,
        seed=arguments.seed,
        max_tokens=limit,
    )
    layouts = ("padded", "packed") if arguments.layout == "both" else (arguments.layout,)
    found = load_models(
        folders,
        dtypes=arguments.dtype,
        attentions=arguments.attention,
        layouts=layouts,
        backward=arguments.backward,
        lengths=sweep.lengths,
        device=device,
    )
    for line in found.not_run:
        print(f"not measured: {line['variant']}: {line['reason']}", flush=True)
    with hold(arguments.output / "throughput.lock"):
        log = open_log(arguments.output / "throughput.jsonl", describe(folders, found, sweep, device))
        with tqdm(total=len(list(sweep.groups())), unit="group", disable=None) as progress:

            def show(rows: list[dict[str, Any]]) -> None:
                progress.update()
                for row in map(summarise, rows):
                    progress.write(to_line(row))

            rows = measure(found.variants, sweep, device=device, log=log, on_group=show)
        print(write_results(arguments.output, folders, found, sweep, [summarise(row) for row in rows], device))
        print(f"wrote {arguments.output}")


def to_line(row: dict[str, Any]) -> str:
    """The line about a variant as soon as it is measured."""
    from megatron_neobert.evaluation.throughput.tables import to_memory

    what = f"{row['model']} {row['dtype']} {row['attention']} {row['layout']} {row['passes']}"
    speed = row["tokens_per_second"]
    result = row["outcome"] if speed is None else f"{speed:,.0f} tokens/s | {to_memory(row['peak_bytes'])}"
    return f"{row['length']} x {row['batch_size']} | {what} | {result}"
