"""ONNX graphs of a Hugging Face folder, compared with PyTorch.

A graph has the inputs input_ids and attention_mask (int64, batch x sequence, of any size) and one output. Large weights
are in a separate file, because protobuf is limited to 2 GB. onnxruntime runs every graph on padded batches of other
sizes than the traced one. The full model needs 160 CPU-seconds and 5 GB of memory.
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import onnx_ir
import onnxruntime
import torch
from onnxruntime.quantization import QuantType
from torch import Tensor
from transformers.exporters import (
    ExportFormat,
    OnnxConfig,
    OnnxExporter,
    OnnxRuntimeDynamicConfig,
    OnnxRuntimeQuantizer,
)

from checkpoint_conversion.compare import Checks, build_prompts, compare_logits
from checkpoint_conversion.config_json import read_model_config
from megatron_neobert.errors import ConversionError, MissingInputError, short_reason
from megatron_neobert.evaluation.models import load_model
from megatron_neobert.huggingface.checks import check_folder
from megatron_neobert.huggingface.folder_files import copy_files, write_config
from megatron_neobert.huggingface.hub import ALL_TOKENIZER_FILES, MODULE_FILES

LARGEST_GRAPH_BYTES = 3 << 29  # of weights in one file; protobuf is limited to 2 GB
OPSET = 18  # version of ONNX's operators: the lowest that PyTorch exports, for the most runtimes
INPUTS = ("input_ids", "attention_mask")

# Largest difference relative to the largest value. 28 x 768 with random weights on CPU shows 5e-6 in fp32 and 0.17 in
# 8 bits; a graph that attends to padding shows 1. The limit for 8 bits refuses broken graphs only; whether the measured
# error is acceptable is the user's decision.
TOLERANCE, TOLERANCE_INT8 = 1e-4, 0.5

# Token counts of the rows of each test batch, limited to the model's longest input. No batch has a size of the traced
# batch, because a graph with a constant size fails only at other sizes.
_BATCHES = ((1,), (7,), (64, 23), (40, 1, 17, 29, 33), (1024,))
_TRACED_LENGTHS = (11, 5, 8)  # token counts of the traced batch, which has padding so that the mask is in the graph


def load_for_task(folder: Path, task: str) -> Any:
    """Load a folder's model in fp32, with its masked-language-model head for fill-mask, else without a head."""
    read_model_config(check_folder(folder), folder / "config.json")
    return load_model(folder, "AutoModelForMaskedLM" if task == "fill-mask" else "AutoModel", return_dict=True)


def write_graphs(model: Any, folder: Path, *, int8: bool) -> dict[Path, Checks]:
    """Create `folder` and write model.onnx into it and, with `int8`, model_quantized.onnx. The folder must not exist.

    Return {path of a graph: {"rows x tokens" of a test batch: difference from PyTorch's output}}.
    """
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    config = OnnxConfig(dynamic_shapes=dict.fromkeys(INPUTS, axes), opset_version=OPSET)
    # Signed weights are twice as fast as unsigned ones on processors with VNNI. They have 7 bits (reduce_range),
    # because without VNNI sums of 8-bit products saturate: logits were wrong by 0.8 of the largest. Activations are
    # quantized at run time.
    weights = OnnxRuntimeDynamicConfig(per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    inputs: Any = build_inputs(model, _TRACED_LENGTHS)
    plain, quantized = folder / "model.onnx", folder / "model_quantized.onnx"
    folder.mkdir()
    with _quiet():
        graph = OnnxExporter().export(model, inputs, config).program
    save_graph(graph, plain)
    checks = {plain: check_graph(model, plain, tolerance=TOLERANCE)}
    if int8:
        with _quiet():
            graph = OnnxRuntimeQuantizer(weights).quantize(graph, inputs, ExportFormat.ONNX)
        save_graph(graph, quantized)
        checks[quantized] = check_graph(model, quantized, tolerance=TOLERANCE_INT8)
    return checks


def save_graph(graph: Any, path: Path) -> None:
    """Write an onnx_ir.Model to `path`. Weights of more than LARGEST_GRAPH_BYTES are written to a second file."""
    weight_bytes = sum(weight.const_value.nbytes for weight in graph.graph.initializers.values())
    onnx_ir.save(graph, path, external_data=f"{path.name}.data" if weight_bytes > LARGEST_GRAPH_BYTES else None)


def check_graph(model: Any, path: Path, *, tolerance: float) -> Checks:
    """Run a graph in onnxruntime on test batches. Return {"rows x tokens" of a batch: difference from PyTorch}.

    Raises ConversionError if onnxruntime cannot run the graph, or an output is not finite or differs by more than
    `tolerance`, relative to the largest value of PyTorch's output.
    """
    session, checks = None, {}
    for lengths in _BATCHES:
        inputs = build_inputs(model, lengths)
        mask_bs = inputs["attention_mask"]
        with torch.no_grad():
            expected = model(**inputs)[0]
        try:
            session = session or onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            (output,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise ConversionError(
                f"{path.name}: onnxruntime {onnxruntime.__version__} cannot run it ({short_reason(error)}). Use the "
                "version in constraints.txt."
            ) from error
        batch = " x ".join(str(size) for size in mask_bs.shape)
        checks[batch] = compare_logits(expected, torch.tensor(output), mask_bs)
        if not checks[batch].within(tolerance):
            raise ConversionError(
                f"with {batch} tokens the graph's output differs from PyTorch's by {checks[batch].relative:.3g} of the "
                f"largest value, more than {tolerance:g}; nothing was written. Use the versions of torch and "
                "onnxruntime in constraints.txt."
            )
    return checks


def build_inputs(model: Any, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return random inputs for a graph, by name: row i is padded after `lengths[i]` tokens or the model's limit."""
    config = model.config
    prompts = build_prompts(config.vocab_size, longest=config.max_position_embeddings, lengths=lengths)
    return dict(zip(INPUTS, prompts, strict=True))


def copy_companions(model: Path, folder: Path, task: str) -> None:
    """Write `model`'s config.json, tokenizer files and LICENSE to `folder`, which contains the graphs' folder.

    For feature extraction, also copy the modules of sentence-transformers (pooling, Dense), which need hidden states.
    Code in `model` is never copied. Raise MissingInputError if the model has no tokenizer.json.
    """
    if not (model / "tokenizer.json").is_file():
        raise MissingInputError(f"{model} has no tokenizer.json, which users of the graph need; add it.")
    modules = MODULE_FILES if task == "feature-extraction" else ()
    copy_files(model, folder, (*ALL_TOKENIZER_FILES, "LICENSE", *modules))
    write_config(folder, check_folder(model))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output on stdout, Python warnings and log messages up to WARNING within a `with` block."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
