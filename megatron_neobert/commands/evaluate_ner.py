"""Command: named-entity recognition, from local files in CoNLL's form, WikiANN's or the Hub's.

    python tools/evaluate_ner.py --model model --data-dir ner --output results --seeds 0 1 2 --jobs 2

Fine-tunes the model at every point of the grid and with every seed, and writes OUTPUT/MODEL/ner.json and .md: entity F1
by seqeval, and beside the weights of the best run the tags that they find. Started again, it resumes with the runs
that are not done.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_neobert.errors import CommandParser, MissingInputError
from megatron_neobert.evaluation.fine_tuning.settings import GRIDS, add_flags, build_protocol, check_flags, given_values
from megatron_neobert.evaluation.ner.data import find_data_sets
from megatron_neobert.runtime.atomic_files import require_folder


def main() -> None:
    """Reads the arguments, runs what has not been run, and prints the table."""
    arguments = _parse()
    check_flags(arguments)
    require_folder("--data-dir", arguments.data_dir, remedy="a folder for each data set in it")
    require_folder("--model", arguments.model, holding="config.json")
    tasks = arguments.tasks or find_data_sets(arguments.data_dir)
    if not tasks:
        raise MissingInputError(
            f"--data-dir {arguments.data_dir}: no folder in it has a training set; put each data set into a folder of "
            "its own, with train.txt, validation.txt and perhaps test.txt, or the Hub's parquet files."
        )
    from megatron_neobert.evaluation.fine_tuning.study import show_progress
    from megatron_neobert.evaluation.ner.run import Evaluation, evaluate

    evaluation = Evaluation(
        model=arguments.model,
        data_dir=arguments.data_dir,
        output=arguments.output,
        tasks=list(dict.fromkeys(tasks)),
        grid=replace(GRIDS[arguments.grid], **given_values(arguments)),
        seeds=tuple(dict.fromkeys(arguments.seeds)),
        protocol=build_protocol(arguments),
        jobs=arguments.jobs,
    )
    evaluate(evaluation, show_progress)
    print((evaluation.folder / "ner.md").read_text(encoding="utf-8"))
    print(f"wrote {evaluation.folder / 'ner.json'} and .md")


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="Hugging Face folder of an encoder")
    add("--data-dir", required=True, type=Path, metavar="DIR", help="a folder per data set")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for the results")
    add("--tasks", nargs="+", metavar="NAME", help="data sets, such as conll2003 wikiann/de (default: all there are)")
    add(
        "--grid",
        choices=tuple(GRIDS),
        default="small",
        help="paper: GLUE's 60 points; small: the 6 of its ablations (default: %(default)s)",
    )
    add_flags(parser)
    return parser.parse_args()
