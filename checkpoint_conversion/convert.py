"""Command: a Megatron checkpoint as a Hugging Face folder, and back; each compared with its source before it appears.

A folder for Hugging Face is loaded again with transformers and compared with `model/reference.py` holding the same
weights. A folder from Hugging Face is read by our own rules, and nothing in it is executed; the checkpoint made of it
is read back from disk and run against the folder's model. Runs on one CPU without GPU, torchrun or Transformer Engine,
for any number of ranks that wrote the checkpoint. Importing torch waits until the arguments are read, so that --help
answers at once.
"""

import argparse
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import CommandParser, ConfigError, ConversionError, OutputError, run_command
from megatron_neobert.runtime.atomic_files import refuse_existing, require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.checkpoint import MegatronCheckpoint
    from checkpoint_conversion.compare import LogitModel
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

VERIFY = """Command: are two models the same?

Each side is a folder that training saved to, or a Hugging Face folder of a masked language model. Both run in fp32 on
the same fixed prompts, padded and, where B's architecture can, packed into one row, each against A's padded rows. Where
both have a layout that conversion reads, the settings that decide the function must be equal as well, and every weight
in every bit, or within the tolerance if one is given. Exit code 0: equal; 1: not.
"""


def main() -> None:
    """Read the arguments and convert."""
    arguments, start = _parse(), time.monotonic()
    # Not Path.resolve, which raises RuntimeError at a link to itself.
    if Path(os.path.realpath(arguments.output)).is_relative_to(os.path.realpath(arguments.load)):
        raise OutputError(
            f"--output {arguments.output} lies in --load {arguments.load}, which is only read; name a folder elsewhere."
        )
    if not arguments.convert(arguments):
        print("nothing new to convert")
        return
    # Of the process so far; Linux counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"wrote {arguments.output} in {time.monotonic() - start:.0f} s with at most {peak:.1f} GiB of memory")


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    commands = parser.add_subparsers(required=True, metavar="megatron-to-hf|hf-to-megatron")
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
    datasets = "data on the Hub, for the model card"
    add("--dataset", dest="datasets", nargs="+", default=(), metavar="OWNER/NAME", help=datasets)
    hub = "upload the folder to this model on the Hub, created private where there is none"
    add("--push-to-hub", dest="model_id", metavar="OWNER/NAME", help=hub)
    revision = "branch to upload to (default: main; with --all-iterations each to iteration-N, the newest to main too)"
    add("--revision", metavar="NAME", help=revision)
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
    """Return the number of folders written."""
    from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints

    if arguments.revision and (arguments.all_iterations or not arguments.model_id):
        raise ConfigError(
            "--revision names the branch of one folder on the Hub; give it with --push-to-hub and without "
            "--all-iterations."
        )
    newest = latest_checkpoint(arguments.load, iteration=arguments.iteration)  # refuses a folder without any
    from checkpoint_conversion.card import Declared, write_model_card
    from checkpoint_conversion.checkpoint import read_checkpoint
    from checkpoint_conversion.export import ExportOptions, export, is_export_of, open_hub_model, push_to_hub

    declared = {name: getattr(arguments, name) for name in ("license", "base_model", "datasets", "model_id")}
    options = ExportOptions(
        layout=arguments.format,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        sentence_transformers=arguments.sentence_transformers,
        verified=arguments.verified,
        declared=Declared(**declared),
    )
    wanted = [(newest, arguments.output)]
    if arguments.all_iterations:
        wanted = [(one, arguments.output / one.name) for one in reversed(list_checkpoints(arguments.load))]
    if arguments.model_id:
        open_hub_model(arguments.model_id)
    written = 0
    for source, folder in wanted:
        iteration = iteration_of(source)
        if is_export_of(folder, source, options):
            print(f"kept {folder}, which is there already")
            write_model_card(folder, options.declared)
        else:
            refuse_existing(folder)
            checkpoint = read_checkpoint(arguments.load, iteration=iteration)
            tokenizer = choose_tokenizer(arguments.tokenizer_model, checkpoint)
            print(f"converting {checkpoint.folder}")
            if checks := export(checkpoint, folder, tokenizer=tokenizer, options=options):
                from checkpoint_conversion.compare import to_table

                print(f"{folder} against the reference in plain PyTorch:\n{to_table(checks)}")
            written += 1
        if arguments.model_id and arguments.all_iterations:
            push_to_hub(folder, arguments.model_id, f"iteration-{iteration}")
        if arguments.model_id and source == newest:
            push_to_hub(folder, arguments.model_id, arguments.revision)
    return written


def choose_tokenizer(path: Path | None, checkpoint: "MegatronCheckpoint") -> "Tokenizer":
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
    """Return the number of checkpoints written."""
    refuse_existing(arguments.output)
    require_folder("--load", arguments.load, holding="config.json")
    from checkpoint_conversion.card import Declared
    from checkpoint_conversion.imports import import_folder
    from megatron_neobert.config.cli import model_flags

    print(f"converting {arguments.load}")
    given = {name: getattr(arguments, name) for name in ("license", "base_model") if getattr(arguments, name)}
    Declared(**given)  # refuses what the Hub would
    imported, checks = import_folder(
        arguments.load,
        arguments.output,
        verified=arguments.verified,
        drop_padding=arguments.drop_padded_vocabulary,
        declared=given,
    )
    for note in imported.notes:
        print(f"note: {note}")
    if checks:
        from checkpoint_conversion.compare import to_table

        print(f"{arguments.output} against the model of {arguments.load}:\n{to_table(checks)}")
    print(
        f"{imported.layout} layout; continue pre-training with --continue-from {arguments.output} --tokenizer-model "
        f"{arguments.load} and the settings of this model: {model_flags(imported.model) or 'the default ones'}"
    )
    return 1


def verify() -> int:
    """Compare two models, print a table, and return 0 or 1: the command `neobert verify`."""
    parser = CommandParser(VERIFY)
    parser.add_argument("first", type=Path, metavar="A", help="folder of checkpoints, or Hugging Face folder")
    parser.add_argument("second", type=Path, metavar="B", help="the same")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference that still counts as equal, over the largest logit, and over the largest value of a "
        "weight (default: 1e-4 for logits, as after a conversion, and none for weights; rounded to bfloat16 on one "
        "side, logits differ by 0.015)",
    )
    arguments = parser.parse_args()
    for name, folder in (("A", arguments.first), ("B", arguments.second)):
        require_folder(name, folder)

    import torch

    from checkpoint_conversion.compare import TOLERANCES, compare_models, to_table

    first, second = (load_side(folder) for folder in (arguments.first, arguments.second))
    if first.vocab_size != second.vocab_size:
        raise ConversionError(
            f"{first.description} predicts {first.vocab_size} tokens and {second.description} {second.vocab_size}; "
            "only models of one vocabulary can be compared."
        )
    checks = compare_models(first, second)
    tolerance = TOLERANCES[torch.float32] if arguments.tolerance is None else arguments.tolerance
    alike = all(comparison.within(tolerance) for comparison in checks.values())
    print(f"A  {first.description}\nB  {second.description}\n\n{to_table(checks)}\n")
    print(f"logits: {'equal' if alike else 'NOT equal'} within {tolerance:g} of the largest")
    alike &= compare_content(first, second, tolerance=arguments.tolerance or 0.0)
    print("equal" if alike else "NOT equal")
    return 0 if alike else 1


def compare_content(first: "LogitModel", second: "LogitModel", *, tolerance: float) -> bool:
    """Print how settings and weights compare, and return False if they are known and differ."""
    from checkpoint_conversion.compare import differing_settings, differing_weights

    if first.weights is None or second.weights is None:
        print("settings and weights: not compared; one of the folders has no layout that conversion reads")
        return True
    settings = differing_settings(first, second)
    print(f"settings: {'; '.join(settings) + ' in A and B' if settings else 'equal'}")
    weights, others = first.weights(), second.weights()
    if {name: tensor.shape for name, tensor in weights.items()} != {name: one.shape for name, one in others.items()}:
        print("weights: not compared; their shapes differ")
        return False
    differing = differing_weights(weights, others)
    if not differing:
        print(f"weights: all {len(weights)} tensors equal bit for bit")
        return not settings
    worst = max(differing, key=lambda name: differing[name])
    print(
        f"weights: {len(differing)} of {len(weights)} tensors differ; most of all {worst}, by {differing[worst]:.2g} "
        "of its largest value"
    )
    return not settings and differing[worst] <= tolerance


def load_side(folder: Path) -> "LogitModel":
    """Return the model of a folder in fp32, whichever kind it is.

    Raises:
        MissingInputError: It holds no model.
        CheckpointError, ConversionError: The model cannot be used.
    """
    if (folder / "config.json").is_file():
        from checkpoint_conversion.imports import load_as_read

        return load_as_read(folder)
    from checkpoint_conversion.checkpoint import read_checkpoint
    from checkpoint_conversion.compare import checkpoint_model

    checkpoint = read_checkpoint(folder)
    return checkpoint_model(checkpoint, description=f"{checkpoint.folder} (Megatron)")


if __name__ == "__main__":
    run_command(main)
