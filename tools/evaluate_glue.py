"""Command: GLUE by the paper's protocol, from local files.

    python tools/evaluate_glue.py --model model --data-dir glue --output results --grid small --seeds 0 1 2 --jobs 2

Fine-tunes the model at every point of the grid and with every seed, and writes OUTPUT/MODEL/glue.json, .csv and .md,
the latter with the paper's rows below. RTE, MRPC, STS-B and QNLI start from the best MNLI model. Started again, it
resumes with the runs that are not done. tools/fetch_glue.py gets the data on a machine with network.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import CommandParser, ConfigError, positive, run_command
from megatron_neobert.evaluation.glue.tasks import PAPER_TASKS, Protocol, choose_tasks
from megatron_neobert.runtime.atomic_files import require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from megatron_neobert.evaluation.glue.run import Evaluation
    from megatron_neobert.evaluation.glue.training import Outcome, Run


def main() -> None:
    """Reads the arguments, runs what has not been run, and prints the table."""
    arguments = _parse()
    _check(arguments)
    from megatron_neobert.evaluation.glue.predictions import write_submission, zip_submission
    from megatron_neobert.evaluation.glue.run import best_model, evaluate

    evaluation = _build_evaluation(arguments)
    evaluate(evaluation, _show_progress)
    print((evaluation.folder / "glue.md").read_text(encoding="utf-8"))
    print(f"wrote {evaluation.folder / 'glue.json'}, .csv and .md")
    if arguments.predict:
        place = evaluation.folder / "glue" / "submission"
        for task in evaluation.tasks:
            weights = best_model(evaluation, task)
            for path in write_submission(task, weights, arguments.data_dir, place, evaluation.protocol):
                print(f"wrote {path}")
        archive, missing = zip_submission(place)
        lacks = f", without {', '.join(missing)}, which the server wants too (--tasks)" if missing else ""
        print(f"wrote {archive} for gluebenchmark.com{lacks}")


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="Hugging Face folder of an encoder")
    add("--data-dir", required=True, type=Path, metavar="DIR", help="a folder per task: TSV, parquet or saved data set")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for the results")
    add("--tasks", nargs="+", metavar="NAME", help="such as cola sst2 (default: all but wnli)")
    add(
        "--grid",
        choices=("paper", "small", "best"),
        default="best",
        help="paper: 60 points per task; small: the 6 of its ablations; best: the one that it found best for its model "
        "(default: %(default)s)",
    )
    add("--batch-size", nargs="+", type=positive, metavar="N", help="replaces the grid's")
    add("--learning-rate", nargs="+", type=float, metavar="X", help="replaces the grid's")
    add("--weight-decay", nargs="+", type=float, metavar="X", help="replaces the grid's")
    add("--seeds", nargs="+", type=int, default=[0], metavar="N", help="default: 0")
    add("--epochs", type=positive, default=10, help="at most (default: %(default)s)")
    add(
        "--max-length",
        type=positive,
        default=1024,
        metavar="N",
        help="cut inputs after N tokens (default: %(default)s)",
    )
    add("--limit", type=positive, metavar="N", help="only N rows of every split, for a quick look")
    add("--jobs", type=positive, default=1, metavar="N", help="runs at a time, on one GPU each (default: 1)")
    transfer = parser.add_mutually_exclusive_group()
    transfer.add_argument(
        "--transfer-from",
        default="mnli",
        metavar="mnli|DIR",
        help="where RTE, MRPC, STS-B and QNLI start: the best MNLI model of this output, or a folder (default: mnli)",
    )
    transfer.add_argument("--no-transfer", action="store_true", help="start every task from --model")
    add(
        "--predict",
        action="store_true",
        help="write the answers for the GLUE server as well: OUTPUT/MODEL/glue/submission.zip",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the passes; weights stay float32; the paper's code took float16 (default: %(default)s)",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--attention", metavar="NAME", help="eager, sdpa, flash_attention_2 (default: transformers')")
    return parser.parse_args()


def _check(arguments: argparse.Namespace) -> None:
    for name in ("learning_rate", "weight_decay", "seeds"):
        if (values := getattr(arguments, name)) and min(values) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {min(values)} is below 0.")
    arguments.tasks = choose_tasks(arguments.tasks, PAPER_TASKS)
    fetch = "on a machine with network: python tools/fetch_glue.py --output DIR"
    require_folder("--data-dir", arguments.data_dir, remedy=fetch)
    require_folder("--model", arguments.model, holding="config.json")


def _build_evaluation(arguments: argparse.Namespace) -> "Evaluation":
    from megatron_neobert.evaluation.glue.run import SOURCE, Evaluation, choose_grid
    from megatron_neobert.evaluation.glue.training import visible_gpus

    gpus = visible_gpus()  # choose_device would start CUDA, and one GPU could not be picked any more
    if arguments.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: torch sees no GPU here; give cpu, or run where there is one.")
    device = arguments.device or ("cuda" if gpus else "cpu")
    if arguments.dtype == "float16" and device == "cpu":
        raise ConfigError("--dtype float16 needs a GPU; on a CPU take float32 or bfloat16.")
    source = arguments.transfer_from
    grid = {"batch_sizes": arguments.batch_size, "learning_rates": arguments.learning_rate}
    return Evaluation(
        model=arguments.model,
        data_dir=arguments.data_dir,
        output=arguments.output,
        grids={
            task: choose_grid(arguments.grid, task, **grid, weight_decays=arguments.weight_decay)
            for task in arguments.tasks
        },
        seeds=tuple(dict.fromkeys(arguments.seeds)),
        protocol=Protocol(
            epochs=arguments.epochs,
            max_length=arguments.max_length,
            limit=arguments.limit,
            dtype=arguments.dtype,
            attention=arguments.attention,
            device=device,
        ),
        transfer_from=None if arguments.no_transfer else source if source == SOURCE else Path(source),
        jobs=arguments.jobs,
        predict=arguments.predict,
    )


def _show_progress(task: str, done: int, total: int, run: "Run | None", outcome: "Outcome | None") -> None:
    """A line for every run that has ended; see run.Progress."""
    line = f"{task} {done}/{total}"
    if run is not None and outcome is not None:
        line += f" | {run.point.name} | {100 * outcome.average:.2f} at step {outcome.best_step:,} of {outcome.steps:,}"
        line += f" | {outcome.seconds:,.0f} s"
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
