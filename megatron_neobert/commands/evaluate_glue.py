"""Command: GLUE by the paper's protocol, from local files.

    neobert evaluate glue --model model --data-dir glue --output results --grid small --seeds 0 1 2 --jobs 2

Fine-tunes the model at every point of the grid and with every seed, and writes OUTPUT/MODEL/glue.json, .csv and .md,
the latter with the paper's rows below. RTE, MRPC, STS-B and QNLI start from the best MNLI model. Started again, it
resumes with the runs that are not done. neobert fetch glue gets the data on a machine with network.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.errors import CommandParser
from megatron_neobert.evaluation.fine_tuning.settings import add_flags, check_flags, given_fields, given_values
from megatron_neobert.evaluation.glue.tasks import PAPER_TASKS, choose_tasks
from megatron_neobert.huggingface.offline import go_offline

if TYPE_CHECKING:  # --help answers without importing torch
    from megatron_neobert.evaluation.glue.run import GlueEvaluation


def main() -> None:
    """Reads the arguments, runs what has not been run, and prints the table."""
    arguments = _parse()
    go_offline()
    _check(arguments)
    from megatron_neobert.evaluation.fine_tuning.study import show_progress
    from megatron_neobert.evaluation.glue.predictions import write_submission, zip_submission
    from megatron_neobert.evaluation.glue.run import best_model, evaluate

    evaluation = _build_evaluation(arguments)
    evaluate(evaluation, show_progress)
    print((evaluation.folder / "glue.md").read_text(encoding="utf-8"))
    print(f"wrote {evaluation.folder / 'glue.json'}, .csv and .md")
    if arguments.predict:
        place, written = evaluation.folder / "glue" / "submission", list[Path]()
        for task in evaluation.tasks:
            weights = best_model(evaluation, task)
            for path in write_submission(task, weights, arguments.data_dir, place, evaluation.protocol):
                print(f"wrote {path}")
                written.append(path)
        archive, missing = zip_submission(place, written)
        lacks = f", without {', '.join(missing)}, which the server wants too (--tasks)" if missing else ""
        print(f"wrote {archive} for gluebenchmark.com{lacks}")


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", metavar="NAME", help="such as cola sst2 (default: all but wnli)")
    add(
        "--grid",
        choices=("paper", "small", "best"),
        default="best",
        help="paper: 60 points per task; small: the 6 of its ablations; best: the one that it found best for its model "
        "(default: %(default)s)",
    )
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
    add_flags(parser)
    return parser.parse_args()


def _check(arguments: argparse.Namespace) -> None:
    arguments.tasks = choose_tasks(arguments.tasks, PAPER_TASKS)
    check_flags(arguments, remedy="on a machine with network: neobert fetch glue --output DIR")


def _build_evaluation(arguments: argparse.Namespace) -> "GlueEvaluation":
    from megatron_neobert.evaluation.glue.run import SOURCE, GlueEvaluation, choose_grid

    source = arguments.transfer_from
    return GlueEvaluation(
        **given_fields(arguments),
        grids={task: choose_grid(arguments.grid, task, **given_values(arguments)) for task in arguments.tasks},
        transfer_from=None if arguments.no_transfer else source if source == SOURCE else Path(source),
        predict=arguments.predict,
    )
