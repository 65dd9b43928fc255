"""The command `neobert export-onnx`: write a Hugging Face folder as ONNX, for onnxruntime, transformers.js and optimum.

Writes onnx/model.onnx in fp32 and with --int8 onnx/model_quantized.onnx with 8-bit weights; config.json and the
tokenizer are written where those libraries expect them. The folder gets its final name only if the graphs agree with
PyTorch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_neobert.cli import option
from megatron_neobert.huggingface.hub import find_model
from megatron_neobert.runtime.atomic_files import build_folder, refuse_existing


@dataclass(frozen=True, kw_only=True)
class OnnxOptions:
    model: Path = option(help="output of neobert convert: folder, or [OWNER/]NAME[@REVISION] of the Hub", metavar="DIR")
    output: Path = option(help="folder to create", metavar="DIR")
    task: Literal["fill-mask", "feature-extraction"] = option(
        "fill-mask",
        "fill-mask: logits of the masked-language-model head; feature-extraction: the last hidden state",
    )
    int8: bool = option(False, "also write model_quantized.onnx with 8-bit weights, and print its error")


def export_onnx(options: OnnxOptions) -> None:
    """Write a Hugging Face folder as ONNX and compare it with PyTorch."""
    refuse_existing(options.output)  # before a minute of work
    source = find_model("--model", options.model)
    # The exporter needs these packages; a missing one is reported before the work.
    import onnx  # noqa: F401
    import onnxscript  # noqa: F401

    from checkpoint_conversion.compare import to_table
    from checkpoint_conversion.export_onnx import copy_companions, load_for_task, write_graphs

    model = load_for_task(source, options.task)
    with build_folder(options.output) as folder:
        copy_companions(source, folder, options.task)
        for path, batches in write_graphs(model, folder / "onnx", int8=options.int8).items():
            size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
            print(f"{path.name}, {size / 1e6:.1f} MB, difference from PyTorch by rows x tokens:")
            print(f"{to_table(batches)}\n")
    print(f"wrote {options.output}")
