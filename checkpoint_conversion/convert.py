"""Command: a Megatron checkpoint as a Hugging Face folder.

Runs on one CPU without GPU, torchrun or Transformer Engine, whatever number of ranks wrote the checkpoint. Importing
torch waits until the arguments are read, so that --help answers at once.
"""

import argparse
from pathlib import Path

from checkpoint_conversion.output_folder import refuse_existing
from megatron_neobert.errors import ConversionError, run_command


def main() -> None:
    """Reads the arguments and converts."""
    arguments = _parse()
    _convert_to_huggingface(arguments)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="convert.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    export = commands.add_parser(
        "megatron-to-hf", help="write a Hugging Face folder and compare it with the reference", allow_abbrev=False
    )
    export.add_argument(
        "--load", required=True, type=Path, metavar="DIR", help="folder that training was given as --save"
    )
    export.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to create")
    export.add_argument(
        "--format", choices=["eurobert"], default="eurobert", help="layout to write (default: eurobert, no remote code)"
    )
    export.add_argument(
        "--tokenizer-model", type=Path, metavar="PATH", help="tokenizer to write (default: the checkpoint's own)"
    )
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the stored weights (default: float32)"
    )
    export.add_argument("--iteration", type=int, metavar="N", help="checkpoint to convert (default: the newest)")
    export.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="let the checkpoint's pickled table of contents run code; only for files from people you trust",
    )
    return parser.parse_args()


def _convert_to_huggingface(arguments: argparse.Namespace) -> None:
    refuse_existing(arguments.output)  # before minutes of reading
    import torch

    from checkpoint_conversion.export import export_eurobert
    from checkpoint_conversion.megatron_reader import read_checkpoint
    from megatron_neobert.data.tokenizer import load_tokenizer
    from megatron_neobert.training.safe_reading import refuse_unsafe_environment

    trust = arguments.trust_checkpoint
    refuse_unsafe_environment(trust)
    checkpoint = read_checkpoint(arguments.load, iteration=arguments.iteration, trust=trust)
    tokenizer = checkpoint.tokenizer
    if arguments.tokenizer_model is not None:
        tokenizer = load_tokenizer(arguments.tokenizer_model)
        if tokenizer.fingerprint != checkpoint.tokenizer.fingerprint:
            raise ConversionError(
                f"--tokenizer-model {arguments.tokenizer_model} ({tokenizer.vocab_size} tokens) encodes differently "
                f"from the tokenizer of {checkpoint.folder} ({checkpoint.tokenizer.vocab_size} tokens); the weights "
                "belong to the latter. Leave the flag out."
            )
    print(f"converting {checkpoint.folder}")
    dtype = getattr(torch, arguments.dtype)
    comparison = export_eurobert(checkpoint, arguments.output, tokenizer=tokenizer, dtype=dtype)
    print(f"compared with the reference in plain PyTorch:\n{comparison.to_table()}")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    run_command(main)
