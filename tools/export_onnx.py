"""Command: a Hugging Face folder as ONNX, for onnxruntime, transformers.js and optimum.

Writes onnx/model.onnx, in fp32 with batch and sequence of any size, and on request onnx/model_quantized.onnx with 8-bit
weights, beside config.json and the tokenizer: the places where those libraries look. onnxruntime runs every file on
padded batches that the tracer has not seen; the folder gets its name only if the fp32 file computes what PyTorch does.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import CommandParser, run_command
from megatron_neobert.runtime.atomic_files import require_folder

TASKS = {"fill-mask": "logits", "feature-extraction": "last_hidden_state"}  # -> name of the graph's output
OPSETS = range(18, 23)  # below, PyTorch cannot go; of 23, onnxruntime 1.31 cannot run the rotation that PyTorch writes


def main() -> None:
    """Reads the arguments, exports, checks and prints the figures."""
    arguments = _parse()
    from checkpoint_conversion.output_folder import refuse_existing

    require_folder("--model", arguments.model, holding="config.json")
    refuse_existing(arguments.output)  # before a minute of work
    import onnx  # noqa: F401 (what is missing is reported before the work)
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401

    _export(arguments)


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument(
        "--model", required=True, type=Path, metavar="DIR", help="Hugging Face folder that convert.py wrote"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--task",
        choices=list(TASKS),
        default="fill-mask",
        help="fill-mask: logits of the masked-language-model head; feature-extraction: the last hidden state, for "
        "embeddings (default: %(default)s)",
    )
    parser.add_argument(
        "--int8", action="store_true", help="write model_quantized.onnx as well; its error is measured and reported"
    )
    parser.add_argument(
        "--opset",
        type=int,
        choices=OPSETS,
        default=OPSETS[0],
        help="version of ONNX's operators (default: %(default)s, which the most runtimes know)",
    )
    return parser.parse_args()


def _export(arguments: argparse.Namespace) -> None:
    from onnx_export.comparison import TOLERANCE, TOLERANCE_INT8, check_graph, refuse_difference
    from onnx_export.folder import copy_companions, write_report
    from onnx_export.graph import load_for_task, quantize, write_graph

    from checkpoint_conversion.output_folder import build_folder

    model = load_for_task(arguments.model, output_name=TASKS[arguments.task])
    with build_folder(arguments.output) as folder:
        copy_companions(arguments.model, folder)
        plain, quantized = folder / "onnx" / "model.onnx", folder / "onnx" / "model_quantized.onnx"
        plain.parent.mkdir()
        write_graph(model, plain, opset=arguments.opset)
        checks = {plain: check_graph(model, plain)}
        refuse_difference(checks[plain], tolerance=TOLERANCE)
        if arguments.int8:
            quantize(plain, quantized)
            checks[quantized] = check_graph(model, quantized)
            refuse_difference(checks[quantized], tolerance=TOLERANCE_INT8)
        write_report(folder, checks, model=arguments.model, task=arguments.task, opset=arguments.opset)
        for path, check in checks.items():
            print(f"{path.name}, {path.stat().st_size / 1e6:.1f} MB, against PyTorch:\n{check.to_table()}\n")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    run_command(main)
