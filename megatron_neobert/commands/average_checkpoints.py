"""Averages the weights of a run's checkpoints into one to continue from, or to convert.

    neobert average --load SAVE --last 5 --output DIR

writes the mean of the newest five; --iteration N takes those up to N. What is written holds weights alone, in fp32, as
a conversion from Hugging Face writes them: for training's --continue-from, or neobert convert's --load.
"""

import argparse
from pathlib import Path

from megatron_neobert.errors import CommandParser, positive
from megatron_neobert.runtime.atomic_files import build_folder, refuse_existing


def main() -> None:
    arguments = parse_arguments()
    refuse_existing(arguments.output)  # before minutes of reading
    from checkpoint_conversion.megatron_io import read_checkpoint, write_checkpoint

    mean = read_checkpoint(arguments.load, iteration=arguments.iteration, average=arguments.last)
    with build_folder(arguments.output) as temporary:
        write_checkpoint(temporary, mean.tensors, mean.settings.model, mean.tokenizer, declared=mean.declared)
    iterations = ", ".join(map(str, mean.averaged))
    print(f"wrote {arguments.output}: the mean of iterations {iterations}, for --continue-from or neobert convert")


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--load", required=True, type=Path, metavar="DIR", help="folder that training was given as --save")
    add("--last", required=True, type=positive, metavar="N", help="number of checkpoints")
    add("--iteration", type=int, metavar="N", help="the last of them (default: the newest)")
    add("--output", required=True, type=Path, metavar="DIR", help="folder to create")
    return parser.parse_args()
