"""Command: a Megatron checkpoint as a Hugging Face folder, and back; each compared with its source before it appears.

A folder for Hugging Face is loaded again with transformers and compared with `model/reference.py` holding the same
weights. A folder from Hugging Face is read by our own rules, and nothing in it is executed; the checkpoint made of it
is read back from disk and run against the folder's model. Runs on one CPU without GPU, torchrun or Transformer Engine,
for any number of ranks that wrote the checkpoint. Importing torch waits until the arguments are read, so that --help
answers at once.
"""

import argparse
import json
import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

import megatron_neobert
from megatron_neobert.config.phases import phase_at
from megatron_neobert.errors import CommandParser, ConfigError, ConversionError, OutputError, run_command
from megatron_neobert.runtime.atomic_files import build_folder, read_text, refuse_existing, require_folder, sha256_of

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.comparison import Checks
    from checkpoint_conversion.hf_reader import ImportedModel
    from checkpoint_conversion.megatron_io import MegatronCheckpoint
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

_SECTIONS = ("model", "data", "optimizer", "training")  # of the settings: what the weights were made with


def main() -> None:
    """Reads the arguments and converts."""
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


# --- to Hugging Face


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What can be chosen about a folder."""

    layout: str = "eurobert"
    dtype: str = "float32"
    max_shard_size: str = "5GB"
    sentence_transformers: bool = False
    verified: bool = True
    license: str | None = None  # the Hub's identifier, for the model card
    base_model: str | None = None  # on the Hub, whose weights training began from; for the model card
    datasets: Sequence[str] = ()  # on the Hub; for the model card
    model_id: str | None = None  # its own name on the Hub; for the model card

    @property
    def choices(self) -> dict[str, Any]:
        """What the files depend on besides layout and dtype."""
        return {name: getattr(self, name) for name in ("max_shard_size", "sentence_transformers")}


def _convert_to_huggingface(arguments: argparse.Namespace) -> int:
    """Returns the number of folders written."""
    from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints

    if arguments.revision and (arguments.all_iterations or not arguments.model_id):
        raise ConfigError(
            "--revision names the branch of one folder on the Hub; give it with --push-to-hub and without "
            "--all-iterations."
        )
    newest = latest_checkpoint(arguments.load, iteration=arguments.iteration)  # refuses a folder without any
    from checkpoint_conversion.comparison import to_table
    from checkpoint_conversion.megatron_io import read_checkpoint
    from checkpoint_conversion.model_card import check_declared

    declared = {name: getattr(arguments, name) for name in ("license", "base_model", "datasets", "model_id")}
    check_declared(**declared)
    options = ExportOptions(
        layout=arguments.format,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        sentence_transformers=arguments.sentence_transformers,
        verified=arguments.verified,
        **declared,
    )
    wanted = [(newest, arguments.output)]
    if arguments.all_iterations:
        wanted = [(one, arguments.output / one.name) for one in reversed(list_checkpoints(arguments.load))]
    hub = None
    if arguments.model_id:
        from checkpoint_conversion.hub import HubModel

        hub = HubModel(arguments.model_id)
    written = 0
    for source, folder in wanted:
        iteration = iteration_of(source)
        if not _is_there(folder, source, options):
            checkpoint = read_checkpoint(arguments.load, iteration=iteration)
            tokenizer = _choose_tokenizer(arguments.tokenizer_model, checkpoint)
            print(f"converting {checkpoint.folder}")
            if checks := export(checkpoint, folder, tokenizer=tokenizer, options=options):
                print(f"{folder} against the reference in plain PyTorch:\n{to_table(checks)}")
            written += 1
        if hub and arguments.all_iterations:
            hub.push(folder, f"iteration-{iteration}")
        if hub and source == newest:
            hub.push(folder, arguments.revision)
    return written


def _is_there(folder: Path, checkpoint: Path, options: ExportOptions) -> bool:
    """Whether the checkpoint was converted before.

    Raises:
        OutputError: Something else is in its place.
    """
    if _is_export_of(folder, checkpoint, options):
        print(f"kept {folder}, which is there already")
        _write_card(folder, options, {})
        return True
    refuse_existing(folder)
    return False


def _is_export_of(folder: Path, checkpoint: Path, options: ExportOptions) -> bool:
    from checkpoint_conversion.model_card import REPORT
    from megatron_neobert.checkpoint.folder import MANIFEST

    try:
        report = json.loads(read_text(folder / REPORT))
        found = (report["source"]["manifest_sha256"], report["format"], report["dtype"], report["options"])
        is_verified = bool(report["verification"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    wanted = (sha256_of(checkpoint / MANIFEST), options.layout, options.dtype, options.choices)
    return found == wanted and is_verified >= options.verified


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


def export(
    checkpoint: "MegatronCheckpoint", output: Path, *, tokenizer: "Tokenizer", options: ExportOptions
) -> "Checks":
    """Writes and verifies the folder.

    Args:
        tokenizer: Written beside the weights; encodes as the checkpoint's own.

    Returns:
        How far the written model is from the reference, empty if that was not wanted.

    Raises:
        OutputError: The folder exists, or cannot be created.
        ConversionError: The weights do not fit, or the written model computes something else. Nothing is left behind.
    """
    import torch

    from checkpoint_conversion.comparison import checkpoint_model, verify
    from checkpoint_conversion.hf_writer import FolderSpec, write_folder, write_sentence_transformers_files

    dtype = getattr(torch, options.dtype)
    with build_folder(output) as temporary:
        model, size, length = checkpoint.settings.model, options.max_shard_size, checkpoint.trained_length
        spec = FolderSpec(model, checkpoint.shape, tokenizer, dtype, model_max_length=length)
        write_folder(temporary, options.layout, spec, checkpoint.tensors, max_shard_size=size)
        checks = {}
        if options.verified:
            from checkpoint_conversion.hf_model import load_logit_model  # transformers: seconds

            source, load = checkpoint_model(checkpoint, dtype), partial(load_logit_model, temporary)
            checks = verify(source, load, stored=dtype, what="the exported model")
        if options.sentence_transformers:
            write_sentence_transformers_files(temporary, options.layout, model, max_seq_length=length)
        _write_report(checkpoint, temporary, checks, options)
        _write_card(temporary, options, checkpoint.declared)
    return checks


def _write_card(folder: Path, options: ExportOptions, declared: Mapping[str, str]) -> None:
    """`declared`: what is known of the source; what neither has stays as in a card that is there."""
    from checkpoint_conversion.model_card import write_model_card

    write_model_card(
        folder,
        license=options.license or declared.get("license"),
        base_model=options.base_model or declared.get("base_model"),
        datasets=options.datasets,
        model_id=options.model_id,
    )


def _write_report(checkpoint: "MegatronCheckpoint", folder: Path, checks: "Checks", options: ExportOptions) -> None:
    """What the folder was made of and how it was checked, for those who meet it later."""
    from checkpoint_conversion.comparison import COMPARED_SETTINGS
    from checkpoint_conversion.model_card import REPORT
    from megatron_neobert.checkpoint.folder import MANIFEST

    progress, continued = checkpoint.progress, checkpoint.settings.checkpoint.continue_from
    last = phase_at(checkpoint.settings, checkpoint.iteration).settings  # of several phases the last that has begun
    settings = {
        section: {item.name: getattr(values, item.name) for item in fields(values) if "is_path" not in item.metadata}
        for section, values in ((name, getattr(last, name)) for name in _SECTIONS)
    }
    report = {
        "source": {
            "checkpoint": checkpoint.folder.name,
            "iteration": checkpoint.iteration,
            "consumed_rows": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            **({"continued_from": Path(continued).name} if continued else {}),
            "manifest_sha256": sha256_of(checkpoint.folder / MANIFEST),
        },
        "format": options.layout,
        "dtype": options.dtype,
        "options": options.choices,
        "training": settings if checkpoint.iteration else {},  # 0: converted, not trained
        "verification": {name: asdict(check) for name, check in checks.items()},
        # Read back from the written folder; one that differed would not be here.
        "compared": {"settings": COMPARED_SETTINGS, "weights": len(checkpoint.tensors)} if checks else {},
        "files": {
            str(path.relative_to(folder)): sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()
        },
        "versions": {
            "megatron_neobert": megatron_neobert.__version__,
            **{name: version(name) for name in ("torch", "transformers", "safetensors")},
        },
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


# --- from Hugging Face


def _convert_to_megatron(arguments: argparse.Namespace) -> int:
    """Returns the number of checkpoints written."""
    refuse_existing(arguments.output)
    require_folder("--load", arguments.load, holding="config.json")
    from checkpoint_conversion.comparison import to_table
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


def import_folder(
    folder: Path,
    output: Path,
    *,
    verified: bool = True,
    drop_padding: bool = False,
    license: str | None = None,
    base_model: str | None = None,
) -> tuple["ImportedModel", "Checks"]:
    """Writes and verifies the checkpoint.

    Args:
        drop_padding: As `read_folder`.
        license: Of the weights; by default as the folder's README.md has it.
        base_model: The weights' name on the Hub; by default as a cache of the Hub or the folder's README.md has it.

    Returns:
        What was read, and how far the checkpoint's model is from the folder's (empty if that was not wanted).

    Raises:
        OutputError: The output exists, or cannot be created.
        MissingInputError, ConversionError: The folder cannot be used. Nothing is left behind.
    """
    import torch

    from checkpoint_conversion.comparison import checkpoint_model, verify
    from checkpoint_conversion.hf_reader import read_folder
    from checkpoint_conversion.mapping import TABLES, to_internal
    from checkpoint_conversion.megatron_io import model_shape, read_checkpoint, write_checkpoint
    from checkpoint_conversion.model_card import read_declared
    from megatron_neobert.config.schema import Settings

    imported = read_folder(folder, drop_padding=drop_padding)
    given = {"license": license, "base_model": base_model}
    declared = read_declared(folder) | {name: value for name, value in given.items() if value}
    shape = model_shape(Settings(model=imported.model), vocab_size=imported.tokenizer.vocab_size)
    tensors = to_internal(imported.weights, shape, TABLES[imported.layout])
    with build_folder(output) as temporary:
        write_checkpoint(temporary, tensors, imported.model, imported.tokenizer, declared=declared)
        checks = {}
        if verified:
            from checkpoint_conversion.hf_model import build_logit_model  # transformers: seconds

            written = checkpoint_model(read_checkpoint(temporary))
            source = build_logit_model(folder, imported.layout, imported.weights)
            checks = verify(source, lambda _: written, stored=torch.float32, what="the written checkpoint")
    return imported, checks


if __name__ == "__main__":
    run_command(main)
