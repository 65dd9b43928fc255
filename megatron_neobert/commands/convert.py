"""The commands `neobert convert megatron-to-hf` and `hf-to-megatron`: a checkpoint as a Hugging Face folder, and back.

Every output folder is compared with its source before it gets its final name. An exported folder is loaded with
transformers and compared with the reference model (model/reference.py) with the same weights. An imported folder is
read as data, and none of its code is executed; the new checkpoint is read again and compared with the folder's model.
Conversion runs in one CPU process, without torchrun or Transformer Engine, for checkpoints of any number of ranks.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_neobert.cli import option
from megatron_neobert.huggingface.hub import find_model
from megatron_neobert.runtime.atomic_files import refuse_existing

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.compare import Checks


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    load: Path = option(help="folder given to training as --save", metavar="DIR")
    output: Path = option(help="folder to create", metavar="DIR")
    layout: Literal["eurobert", "neobert"] = option(
        "eurobert",
        "layout of the output: eurobert needs no remote code; neobert has the published names",
        flag="--format",
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of the stored weights")
    sentence_transformers: bool = option(False, "add the files that SentenceTransformer(DIR) reads: mean pooling")
    iteration: int | None = option(None, "checkpoint to convert (default: the newest)")
    no_verification: bool = option(False, "do not compare the output with its source")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    load: Path = option(help="masked language model: Hugging Face folder, or [OWNER/]NAME[@REVISION]", metavar="DIR")
    output: Path = option(help="folder to create, for training's --continue-from", metavar="DIR")
    tokenizer_model: Path | None = option(
        None, "tokenizer to continue with, instead of the folder's; its tokens start with weights of the old ones"
    )
    no_verification: bool = option(False, "do not compare the output with its source")


def convert_megatron_to_hf(options: ExportOptions) -> None:
    """Write a Megatron checkpoint as a Hugging Face folder and compare it with the reference model.

    The reference is a plain PyTorch model with the checkpoint's weights. --no-verification skips the comparison.
    """
    from megatron_neobert.checkpoint.folder import latest_checkpoint

    start = time.monotonic()
    refuse_existing(options.output)
    latest_checkpoint(options.load, iteration=options.iteration)  # fails before torch is imported
    from checkpoint_conversion.checkpoint import read_checkpoint
    from checkpoint_conversion.export import export
    from megatron_neobert.config.phases import phases_until

    checkpoint = read_checkpoint(options.load, iteration=options.iteration)
    print(f"converting {checkpoint.folder}")
    phases = phases_until(checkpoint.settings, checkpoint.train_state.iteration)
    if {phase.settings.data.objective for phase in phases} == {"clm"}:
        print(
            "warning: this run was trained with --objective clm only. The exported model attends to both sides, which "
            "these weights have not learned; train with mlm first."
        )
    checks = export(
        checkpoint,
        options.output,
        layout=options.layout,
        dtype=options.dtype,
        sentence_transformers=options.sentence_transformers,
        verified=not options.no_verification,
    )
    print_result(options.output, checks, source="the reference in plain PyTorch", start=start)


def convert_hf_to_megatron(options: ImportOptions) -> None:
    """Write a Hugging Face folder as a checkpoint for --continue-from and compare it with the folder's model."""
    start = time.monotonic()
    refuse_existing(options.output)
    options = replace(options, load=find_model("--load", options.load))
    from checkpoint_conversion.imports import import_folder
    from megatron_neobert.config.cli import model_flags
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    print(f"converting {options.load}")
    tokenizer = None if options.tokenizer_model is None else load_tokenizer(options.tokenizer_model)
    imported, checks = import_folder(
        options.load, options.output, tokenizer=tokenizer, verified=not options.no_verification
    )
    for note in imported.notes:
        print(f"note: {note}")
    print(
        f"{imported.layout} layout; continue pre-training with --continue-from {options.output} --tokenizer-model "
        f"{options.tokenizer_model or options.load} and the settings of this model: "
        f"{model_flags(imported.model) or 'the defaults'}"
    )
    print_result(options.output, checks, source=f"the model of {options.load}", start=start)


def print_result(output: Path, checks: "Checks", *, source: str, start: float) -> None:
    """Print a table of `checks` if there are any, and the seconds since `start`, an earlier time.monotonic()."""
    if checks:
        from checkpoint_conversion.compare import to_table

        print(f"logits of {output}, compared with {source}:\n{to_table(checks)}")
    print(f"wrote {output} in {time.monotonic() - start:.0f} s")
