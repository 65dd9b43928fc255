"""The commands that convert checkpoints: a Megatron checkpoint as a Hugging Face folder, and back.

Each written folder is compared with its source before it gets its name. A folder for Hugging Face is loaded again with
transformers and compared with `model/reference.py` holding the same weights. A folder from Hugging Face is read by our
own rules, and nothing in it is executed; the checkpoint made of it is read back from disk and run against the folder's
model. Runs on one CPU without GPU, torchrun or Transformer Engine, for any number of ranks that wrote the checkpoint.

As a file of the checkout this module is `neobert convert`.
"""

import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from checkpoint_conversion.options import ExportOptions, ImportOptions, VerifyOptions
from megatron_neobert import __main__ as neobert
from megatron_neobert.errors import ConfigError, ConversionError, OutputError, run_command
from megatron_neobert.runtime.atomic_files import refuse_existing, require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.card import Declared
    from checkpoint_conversion.checkpoint import MegatronCheckpoint
    from checkpoint_conversion.compare import LogitModel
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer


def main() -> int | None:
    """Run `neobert convert` with the words of this command line."""
    sys.argv.insert(1, "convert")
    return neobert.main()


def megatron_to_hf(options: ExportOptions) -> None:
    """Write a Megatron checkpoint as a Hugging Face folder and compare it with the reference.

    Raises:
        ConfigError: Flags exclude each other, or the Hub would refuse a declared value.
        MissingInputError: There is no checkpoint.
        ConversionError: The weights do not fit, or the written model computes something else.
        OutputError: The output is in --load, exists, cannot be created, or cannot be uploaded.
    """
    from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints

    start, problems = time.monotonic(), []
    refuse_output_in_source(options.load, options.output)
    if options.all_iterations and options.iteration is not None:
        problems.append(f"--iteration {options.iteration} and --all-iterations exclude each other; give one of them.")
    if options.revision and (options.all_iterations or not options.push_to_hub):
        problems.append(
            "--revision names the branch of one folder on the Hub; give it with --push-to-hub and without "
            "--all-iterations."
        )
    if problems:
        raise ConfigError(problems)
    newest = latest_checkpoint(options.load, iteration=options.iteration)  # refuses a folder without any
    from checkpoint_conversion.card import Declared, write_model_card
    from checkpoint_conversion.export import is_export_of, open_hub_model, push_to_hub

    declared = Declared(
        license=options.license,
        base_model=options.base_model,
        datasets=options.datasets,
        model_id=options.push_to_hub,
    )
    wanted = [(newest, options.output)]
    if options.all_iterations:
        wanted = [(one, options.output / one.name) for one in reversed(list_checkpoints(options.load))]
    if options.push_to_hub:
        open_hub_model(options.push_to_hub)
    written = 0
    for source, folder in wanted:
        iteration = iteration_of(source)
        if is_export_of(folder, source, options):
            print(f"kept {folder}, which is there already")
            write_model_card(folder, declared)
        else:
            export_iteration(iteration, folder, options, declared)
            written += 1
        if options.push_to_hub and options.all_iterations:
            push_to_hub(folder, options.push_to_hub, f"iteration-{iteration}")
        if options.push_to_hub and source == newest:
            push_to_hub(folder, options.push_to_hub, options.revision)
    if written:
        print_cost(options.output, start)
    else:
        print("nothing new to convert")


def refuse_output_in_source(load: Path, output: Path) -> None:
    """Raise OutputError if the output would be written into the folder that is read."""
    # Not Path.resolve, which raises RuntimeError at a link to itself.
    if Path(os.path.realpath(output)).is_relative_to(os.path.realpath(load)):
        raise OutputError(f"--output {output} lies in --load {load}, which is only read; name a folder elsewhere.")


def print_cost(output: Path, start: float) -> None:
    """Print the duration of the conversion and the memory of the process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    print(f"wrote {output} in {time.monotonic() - start:.0f} s with at most {peak:.1f} GiB of memory")


def export_iteration(iteration: int, folder: Path, options: ExportOptions, declared: "Declared") -> None:
    """Write the folder of one checkpoint, and print how it compares with the reference."""
    from checkpoint_conversion.checkpoint import read_checkpoint
    from checkpoint_conversion.export import export

    refuse_existing(folder)
    checkpoint = read_checkpoint(options.load, iteration=iteration)
    tokenizer = choose_tokenizer(options.tokenizer_model, checkpoint)
    print(f"converting {checkpoint.folder}")
    if checks := export(checkpoint, folder, tokenizer=tokenizer, options=options, declared=declared):
        from checkpoint_conversion.compare import to_table

        print(f"{folder} against the reference in plain PyTorch:\n{to_table(checks)}")


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


def hf_to_megatron(options: ImportOptions) -> None:
    """Write a checkpoint to continue pre-training from and compare it with the model of the Hugging Face folder.

    Raises:
        ConfigError: The Hub would refuse a declared value.
        MissingInputError: There is no config.json.
        ConversionError: The folder holds no model that a checkpoint can hold, or the written one computes another.
        OutputError: The output is in --load, exists, or cannot be created.
    """
    start = time.monotonic()
    refuse_output_in_source(options.load, options.output)
    refuse_existing(options.output)
    require_folder("--load", options.load, holding="config.json")
    from checkpoint_conversion.card import Declared
    from checkpoint_conversion.imports import import_folder
    from megatron_neobert.config.cli import model_flags

    given = {name: text for name in ("license", "base_model") if (text := getattr(options, name))}
    Declared(**given)  # refuses what the Hub would
    print(f"converting {options.load}")
    imported, checks = import_folder(
        options.load,
        options.output,
        verified=not options.no_verification,
        drop_padding=options.drop_padded_vocabulary,
        declared=given,
    )
    for note in imported.notes:
        print(f"note: {note}")
    if checks:
        from checkpoint_conversion.compare import to_table

        print(f"{options.output} against the model of {options.load}:\n{to_table(checks)}")
    print(
        f"{imported.layout} layout; continue pre-training with --continue-from {options.output} --tokenizer-model "
        f"{options.load} and the settings of this model: {model_flags(imported.model) or 'the default ones'}"
    )
    print_cost(options.output, start)


def verify(options: VerifyOptions) -> int:
    """Check whether two models are the same, as checkpoints or Hugging Face folders: exit 0 if they are, else 1.

    Both run in fp32 on the same fixed prompts, padded and, where B's architecture can, packed into one row, each
    against A's padded rows. Where both have a layout that conversion reads, the settings that decide the function must
    be equal as well, and every weight in every bit, or within the tolerance if one is given.
    """
    for name, folder in (("A", options.first), ("B", options.second)):
        require_folder(name, folder)

    import torch

    from checkpoint_conversion.compare import TOLERANCES, compare_models, to_table

    first, second = (load_side(folder) for folder in (options.first, options.second))
    if first.vocab_size != second.vocab_size:
        raise ConversionError(
            f"{first.description} predicts {first.vocab_size} tokens and {second.description} {second.vocab_size}; "
            "only models of one vocabulary can be compared."
        )
    checks = compare_models(first, second)
    tolerance = TOLERANCES[torch.float32] if options.tolerance is None else options.tolerance
    alike = all(comparison.within(tolerance) for comparison in checks.values())
    print(f"A  {first.description}\nB  {second.description}\n\n{to_table(checks)}\n")
    print(f"logits: {'equal' if alike else 'NOT equal'} within {tolerance:g} of the largest")
    alike &= compare_content(first, second, tolerance=options.tolerance or 0.0)
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
