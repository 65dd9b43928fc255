"""Command: named-entity recognition, from local files in CoNLL's form, WikiANN's or the Hub's.

    neobert evaluate ner --model model --data-dir ner --output results --seeds 0 1 2 --jobs 2

Fine-tunes the model at every point of the grid and with every seed, and writes OUTPUT/MODEL/ner.json and .md: entity F1
by seqeval, and beside the weights of the best run the tags that they find. Started again, it resumes with the runs
that are not done.
"""

import argparse
from dataclasses import replace

from megatron_neobert.errors import CommandParser, MissingInputError
from megatron_neobert.evaluation.fine_tuning.settings import GRIDS, add_flags, check_flags, given_fields, given_values
from megatron_neobert.evaluation.ner.data import find_data_sets
from megatron_neobert.huggingface.offline import go_offline


def main() -> None:
    """Reads the arguments, runs what has not been run, and prints the table."""
    arguments = _parse()
    go_offline()
    check_flags(arguments, remedy="a folder for each data set in it")
    tasks = arguments.tasks or find_data_sets(arguments.data_dir)
    if not tasks:
        raise MissingInputError(
            f"--data-dir {arguments.data_dir}: no folder in it has a training set; put each data set into a folder of "
            "its own, with train.txt, validation.txt and perhaps test.txt, or the Hub's parquet files."
        )
    from megatron_neobert.evaluation.fine_tuning.study import show_progress
    from megatron_neobert.evaluation.ner.run import NerEvaluation, evaluate

    evaluation = NerEvaluation(
        **given_fields(arguments),
        tasks=list(dict.fromkeys(tasks)),
        grid=replace(GRIDS[arguments.grid], **given_values(arguments)),
    )
    evaluate(evaluation, show_progress)
    print((evaluation.folder / "ner.md").read_text(encoding="utf-8"))
    print(f"wrote {evaluation.folder / 'ner.json'} and .md")


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", metavar="NAME", help="data sets, such as conll2003 wikiann/de (default: all there are)")
    add(
        "--grid",
        choices=tuple(GRIDS),
        default="small",
        help="paper: GLUE's 60 points; small: the 6 of its ablations (default: %(default)s)",
    )
    add_flags(parser)
    return parser.parse_args()
