"""Command: MTEB, or tasks from your own files, for an encoder in a Hugging Face folder; without a network.

Data comes from the folder that neobert fetch mteb filled on a connected machine. Every task's result is kept: the same
command resumes after a kill. Writes mteb.json, mteb.csv and mteb.md under OUTPUT/<model name>, with the means by
category of the paper's Table 4; a task without data leaves its category without a mean. Other tasks and other settings
than the defaults have a folder of their own there, whose name holds them, such as mteb_v2_cls_float16: no command
replaces another's table.
"""

import argparse
import hashlib
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import CommandParser, MissingInputError, positive
from megatron_neobert.evaluation.reported_numbers import MTEB_BENCHMARKS, MTEB_PAPER, MTEB_SUCCESSOR
from megatron_neobert.huggingface.offline import go_offline
from megatron_neobert.runtime.atomic_files import require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from megatron_neobert.evaluation.encoders import LoadOptions

# What changes a score, and what stands before a value of it in the name of a folder.
_DEFAULTS = {
    "pooling": "mean",
    "max_length": 1024,
    "batch_size": 32,
    "dtype": "float32",
    "attention": None,
    "limit": None,
    "instructions": "none",
    "prompt_style": "prefix",
}
_NAMES = {"max_length": "length", "batch_size": "batch", "limit": "limit", "instructions": "instructions-"}
_BENCHMARK_NAMES = {MTEB_PAPER: "", MTEB_SUCCESSOR: "v2"}
_LONGEST_NAME = 100  # characters of the tasks in a folder's name


def main() -> None:
    """Reads the arguments, evaluates and writes the tables."""
    arguments = _parse()
    require_folder("--model", arguments.model, holding="config.json")
    fetch = "on a machine with network: neobert fetch mteb --output DIR"
    require_folder("--data-dir", arguments.data_dir, remedy=fetch)
    go_offline()
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    warnings.filterwarnings("ignore", module=r"sklearn\.")  # not converged, ill-defined: mteb's protocol, for each draw
    _evaluate(arguments)


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="Hugging Face folder of an encoder")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for results")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--benchmark", choices=MTEB_BENCHMARKS, default=MTEB_PAPER, help="all its tasks (default: %(default)s)"
    )
    what.add_argument(
        "--tasks", nargs="+", metavar="NAME", help="these tasks; local:NAME reads the files of DATA_DIR/NAME"
    )
    add(
        "--data-dir",
        required=True,
        type=Path,
        metavar="DIR",
        help="what neobert fetch mteb wrote, and folders of local tasks",
    )
    add("--skip-missing", action="store_true", help="evaluate the tasks whose data is there; the others are named")
    add(
        "--instructions",
        metavar="FILE",
        help="YAML with a text per task or type, or a recipe, evaluation/mteb_instructions (default: none)",
    )
    add(
        "--prompt-style",
        choices=["prefix", "paper"],
        help="prefix: instruction, space, text; not before documents. paper: instruction [SEP] [CLS] text, before "
        "documents too (default: %(default)s)",
    )
    add("--pooling", choices=["mean", "cls"], help="default: %(default)s")
    add("--max-length", type=positive, metavar="N", help="cut texts after N tokens (default: %(default)s)")
    add("--batch-size", type=positive, metavar="N", help="texts at once (default: %(default)s)")
    dtypes = "of weights and activations; the paper's code keeps float32 weights under float16 autocast"
    add("--dtype", choices=["float32", "float16", "bfloat16"], help=f"{dtypes} (default: %(default)s)")
    add("--device", help="such as cuda:1 (default: cuda if there is one, else cpu)")
    add("--attention", metavar="NAME", help="transformers' attn_implementation (default: its choice)")
    add("--limit", type=positive, metavar="N", help="only N examples or queries per task: a quick look, not a result")
    parser.set_defaults(**_DEFAULTS)
    return parser.parse_args()


def _evaluate(arguments: argparse.Namespace) -> None:
    import torch

    from megatron_neobert.evaluation.encoders import LoadOptions, choose_device, fingerprint, load_tokenizer
    from megatron_neobert.evaluation.mteb.encoder import Instructions, build_encoder, read_instructions
    from megatron_neobert.evaluation.mteb.run import ResultFiles, find_missing, run_tasks
    from megatron_neobert.evaluation.mteb.tasks import benchmark_tasks, flatten, tasks_by_name
    from megatron_neobert.evaluation.records import hold

    if arguments.tasks:
        tasks = tasks_by_name(arguments.tasks, arguments.data_dir)
    else:
        tasks = benchmark_tasks(arguments.benchmark)
    instructions = Instructions()
    if arguments.instructions != "none":
        tokenizer = load_tokenizer(arguments.model)
        instructions = read_instructions(find_config(arguments.instructions), arguments.prompt_style, tokenizer)
    instructions.refuse_gaps(flatten(tasks))
    device = choose_device(arguments.device)
    load = LoadOptions(dtype=getattr(torch, arguments.dtype), device=device, attention=arguments.attention)
    # What changes a score. The size of batches does too: in 16 bits, padding rounds differently.
    protocol = {name: getattr(arguments, name) for name in _DEFAULTS} | {"instructions": instructions.digest}
    if instructions.digest == "none":
        protocol["prompt_style"] = None
    name = arguments.model.resolve().name
    folder = arguments.output / name
    files = ResultFiles(folder / "mteb", name=name, fingerprint=fingerprint(arguments.model), settings=protocol)
    missing = find_missing(tasks, files, arguments.data_dir)
    if missing and not arguments.skip_missing:
        raise MissingInputError(
            f"--data-dir {arguments.data_dir}: no data of {len(missing)} tasks ({', '.join(missing)}); run "
            "neobert fetch mteb --output DIR with the same --benchmark or --tasks on a machine with a network and "
            "copy DIR here, or leave them out with --skip-missing."
        )
    place = folder / _place(arguments, protocol)
    with hold(place / "mteb.lock"):
        scores = run_tasks(
            tasks,
            lambda: build_encoder(
                arguments.model,
                instructions,
                load,
                pooling=arguments.pooling,
                max_length=arguments.max_length,
                show_progress=sys.stderr.isatty(),
            ),
            files,
            data_dir=arguments.data_dir,
            batch_size=arguments.batch_size,
            limit=arguments.limit,
            report=lambda line: print(line, flush=True),
        )
        _write(arguments, place, scores, protocol, load)


def _place(arguments: argparse.Namespace, protocol: dict[str, Any]) -> str:
    """The folder of one choice of tasks and settings; empty for the paper's benchmark with the defaults.

    Tasks have the same folder in any order; where their names are too long for it, digits stand in their place.
    """
    what = "+".join(sorted(arguments.tasks)) if arguments.tasks else _BENCHMARK_NAMES[arguments.benchmark]
    if len(what) > _LONGEST_NAME:
        what = f"{len(arguments.tasks)}-tasks-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    changed = {key: value for key, value in protocol.items() if value not in (None, _DEFAULTS[key])}
    parts = [what, *(f"{_NAMES.get(key, '')}{value}" for key, value in changed.items())]
    name = "_".join(re.sub(r"[^\w+.-]", "-", part) for part in parts if part)
    return name and f"mteb_{name}"


def _write(
    arguments: argparse.Namespace, place: Path, scores: list[Any], protocol: dict[str, Any], load: "LoadOptions"
) -> None:
    from megatron_neobert.evaluation.mteb.run import COLUMNS, csv_rows, to_results
    from megatron_neobert.evaluation.pages import to_csv
    from megatron_neobert.evaluation.records import write_record
    from megatron_neobert.evaluation.report import write_page
    from megatron_neobert.runtime.atomic_files import replace_file

    results, settings = to_results(scores), {**protocol, "tasks": arguments.tasks or arguments.benchmark}
    record = place / "mteb.json"
    write_record(record, "mteb", folder=arguments.model, settings=settings, results=results, device=load.device)
    replace_file(place / "mteb.csv", to_csv(COLUMNS, csv_rows(results)))
    print(f"\n{write_page('mteb', [record], place)}\nwrote {record}, mteb.csv and mteb.md")
