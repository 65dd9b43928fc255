"""Writes the model card of a converted model anew, with what only its owner knows.

    neobert model-card --model DIR --license apache-2.0 --language en --dataset tiiuae/falcon-refinedweb

replaces DIR/README.md. A flag that is left out keeps what the card has already, and so does the text below the card's
last line.
"""

import argparse
from pathlib import Path

from megatron_neobert.errors import CommandParser
from megatron_neobert.runtime.atomic_files import require_folder


def main() -> None:
    arguments = parse_arguments()
    for flag, folders in {"--model": [arguments.model], "--results": arguments.results}.items():
        for folder in folders:
            require_folder(flag, folder)
    from checkpoint_conversion.card import CARD, Declared, read_results, write_model_card

    declared = Declared(
        model_id=arguments.name,
        license=arguments.license,
        base_model=arguments.base_model,
        datasets=arguments.dataset,
        language=arguments.language,
    )
    results = read_results(arguments.results, arguments.model) if arguments.results else ()
    write_model_card(arguments.model, declared, results)
    print(f"wrote {arguments.model / CARD}")


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="folder of a converted model")
    add("--name", metavar="OWNER/NAME", help="of the model on the Hub, for the card's examples")
    add("--license", metavar="ID", help="the Hub's identifier, such as apache-2.0 (at first: unknown)")
    add("--base-model", metavar="OWNER/NAME", help="model on the Hub whose weights training started from")
    add("--dataset", nargs="+", default=(), metavar="OWNER/NAME", help="training data on the Hub")
    scores = "--output of evaluations of this model: scores of GLUE and named-entity recognition"
    add("--results", nargs="+", type=Path, default=(), metavar="DIR", help=scores)
    add("--language", nargs="+", default=(), metavar="CODE", help="ISO 639 codes, such as en")
    return parser.parse_args()
