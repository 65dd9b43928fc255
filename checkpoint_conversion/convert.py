"""Command: a Megatron checkpoint as a Hugging Face folder, and back.

Runs on one CPU without GPU, torchrun or Transformer Engine, for any number of ranks that wrote the checkpoint.
Importing torch waits until the arguments are read, so that --help answers at once.
"""

import argparse
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import CommandParser, ConversionError, OutputError, run_command
from megatron_neobert.runtime.atomic_files import require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.conversion import ExportOptions
    from checkpoint_conversion.megatron_io import MegatronCheckpoint
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer


def main() -> None:
    """Reads the arguments and converts."""
    arguments, start = _parse(), time.monotonic()
    if not arguments.convert(arguments):
        print("nothing new to convert")
        return
    # Of the process so far; Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"wrote {arguments.output} in {time.monotonic() - start:.0f} s with at most {peak:.1f} GiB of memory")


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser("megatron-to-hf", help="write a Hugging Face folder and compare it with the reference")
    export.set_defaults(convert=_convert_to_huggingface)
    add = export.add_argument
    add("--load", required=True, type=Path, metavar="DIR", help="folder that training was given as --save")
    add("--output", required=True, type=Path, metavar="DIR", help="folder to create")
    layouts = "layout to write (default: eurobert, which needs no remote code; neobert has the published names)"
    add("--format", choices=["eurobert", "neobert", "llama"], default="eurobert", help=layouts)
    add("--tokenizer-model", type=Path, metavar="PATH", help="tokenizer to write (default: the checkpoint's own)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the stored weights (default: float32)")
    add("--max-shard-size", default="5GB", type=_size, metavar="SIZE", help="cut larger weights (default: 5GB)")
    add("--sentence-transformers", action="store_true", help="add what SentenceTransformer(DIR) reads: mean pooling")
    iterations = export.add_mutually_exclusive_group()
    iterations.add_argument("--iteration", type=int, metavar="N", help="checkpoint to convert (default: the newest)")
    every = "convert every checkpoint into a subfolder of --output; folders that are there already are kept"
    iterations.add_argument("--all-iterations", action="store_true", help=every)
    back = commands.add_parser(
        "hf-to-megatron",
        help="write a checkpoint to continue pre-training from and compare it with the folder's model",
    )
    back.set_defaults(convert=_convert_to_megatron)
    add = back.add_argument
    add("--load", required=True, type=Path, metavar="DIR", help="Hugging Face folder with a masked language model")
    add("--output", required=True, type=Path, metavar="DIR", help="folder to create, for training's --continue-from")
    add("--drop-padded-vocabulary", action="store_true", help="cut off rows of zeros behind the tokenizer's last id")
    for command in (export, back):
        add, default = command.add_argument, "for the model card (default: as in the source)"
        add("--license", metavar="ID", help=f"licence of the weights, such as apache-2.0, {default}")
        add("--base-model", metavar="OWNER/NAME", help=f"model on the Hub that training begins from, {default}")
        unverified = "do not run the written model against its source"
        add("--no-verification", dest="verified", action="store_false", help=unverified)
    return parser.parse_args()


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d{0,5}(KB|MB|GB|TB)", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return text


def _convert_to_huggingface(arguments: argparse.Namespace) -> int:
    """Returns the number of folders written."""
    from checkpoint_conversion.output_folder import refuse_existing, refuse_inside
    from megatron_neobert.checkpoint.folder import latest_checkpoint

    output: Path = arguments.output
    refuse_inside(output, arguments.load)
    if not arguments.all_iterations:
        refuse_existing(output)  # before minutes of reading
    latest_checkpoint(arguments.load, iteration=arguments.iteration)  # refuses a folder without any
    import torch

    from checkpoint_conversion.comparison import to_table
    from checkpoint_conversion.conversion import ExportOptions, export
    from checkpoint_conversion.megatron_io import read_checkpoint
    from checkpoint_conversion.model_card import check_declared

    check_declared(license=arguments.license, base_model=arguments.base_model)
    options = ExportOptions(
        layout=arguments.format,
        dtype=getattr(torch, arguments.dtype),
        max_shard_size=arguments.max_shard_size,
        sentence_transformers=arguments.sentence_transformers,
        verified=arguments.verified,
        license=arguments.license,
        base_model=arguments.base_model,
    )
    wanted = _every_iteration(arguments, options) if arguments.all_iterations else [(arguments.iteration, output)]
    written = 0
    for iteration, folder in wanted:
        checkpoint = read_checkpoint(arguments.load, iteration=iteration)
        tokenizer = _choose_tokenizer(arguments.tokenizer_model, checkpoint)
        print(f"converting {checkpoint.folder}")
        if checks := export(checkpoint, folder, tokenizer=tokenizer, options=options):
            print(f"{folder} against the reference in plain PyTorch:\n{to_table(checks)}")
        written += 1
    return written


def _every_iteration(arguments: argparse.Namespace, options: "ExportOptions") -> Iterator[tuple[int, Path]]:
    """Each checkpoint of the save folder and its place, but for those that were converted before."""
    from checkpoint_conversion.conversion import is_export_of
    from megatron_neobert.checkpoint.folder import iteration_of, list_checkpoints

    for checkpoint in reversed(list_checkpoints(arguments.load)):
        folder = arguments.output / checkpoint.name
        if not folder.exists():
            yield iteration_of(checkpoint), folder
        elif is_export_of(folder, checkpoint, options):
            print(f"kept {folder}, which is there already")
        else:
            raise OutputError(
                f"--output {folder} is there, but was not made from {checkpoint} with these options; name another "
                "--output or remove it."
            )


def _choose_tokenizer(path: Path | None, checkpoint: "MegatronCheckpoint") -> "Tokenizer":
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    if path is None:
        return checkpoint.tokenizer
    tokenizer = load_tokenizer(path)
    if tokenizer.fingerprint != checkpoint.tokenizer.fingerprint:
        raise ConversionError(
            f"--tokenizer-model {path} ({tokenizer.vocab_size} tokens) encodes differently from the tokenizer of "
            f"{checkpoint.folder} ({checkpoint.tokenizer.vocab_size} tokens); the weights belong to the latter. Leave "
            "the flag out."
        )
    return tokenizer


def _convert_to_megatron(arguments: argparse.Namespace) -> int:
    """Returns the number of checkpoints written."""
    from checkpoint_conversion.output_folder import refuse_existing, refuse_inside

    refuse_inside(arguments.output, arguments.load)
    refuse_existing(arguments.output)
    require_folder("--load", arguments.load, holding="config.json")
    from checkpoint_conversion.comparison import to_table
    from checkpoint_conversion.conversion import import_folder
    from checkpoint_conversion.model_card import check_declared
    from megatron_neobert.config.cli import model_flags

    print(f"converting {arguments.load}")
    check_declared(license=arguments.license, base_model=arguments.base_model)
    imported, checks = import_folder(
        arguments.load,
        arguments.output,
        verified=arguments.verified,
        drop_padding=arguments.drop_padded_vocabulary,
        license=arguments.license,
        base_model=arguments.base_model,
    )
    for note in imported.notes:
        print(f"note: {note}")
    if checks:
        print(f"{arguments.output} against the model of {arguments.load}:\n{to_table(checks)}")
    print(
        f"{imported.layout} layout; continue pre-training with --continue-from {arguments.output} --tokenizer-model "
        f"{arguments.load} and the settings of this model: {model_flags(imported.model) or 'the default ones'}"
    )
    return 1


if __name__ == "__main__":
    run_command(main)
