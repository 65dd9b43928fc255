"""From a Hugging Face folder to ONNX graphs: the model in PyTorch, its graph in fp32, and the same with 8-bit weights.

A graph has the inputs `input_ids` and `attention_mask` (int64, batch x sequence, both of any size) and one output, and
is one file: ONNX files end at 2 GB, which NeoBERT's 0.98 GB stays below. Full size takes a minute and 4 GB of memory.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor

from checkpoint_conversion.hf_config import read_model_config
from checkpoint_conversion.hf_folder import check_folder
from checkpoint_conversion.hf_model import load_backbone, load_model
from checkpoint_conversion.layouts import LAYOUTS
from megatron_neobert.errors import ConversionError

INPUTS = ("input_ids", "attention_mask")
LARGEST_BYTES = 2_000_000_000  # of weights; protobuf ends at 2^31 with the graph included

# Another batch size and other lengths than any that comparison.py uses; padded, so that the mask is part of the graph.
_TRACED_LENGTHS = (11, 5, 8)


class OneOutput(torch.nn.Module):
    """A transformers model reduced to two inputs and the one tensor that the graph shall give."""

    def __init__(self, model: Any, output_name: str) -> None:
        super().__init__()
        self.model = model
        self.output_name = output_name
        self.config = model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask)[self.output_name]
        return output


def load_for_task(folder: Path, *, output_name: str) -> OneOutput:
    """The folder's model in fp32: with its masked-language-model head for `logits`, else without.

    Raises:
        ConversionError: It is no NeoBERT, lacks the head, or is too large for one file.
    """
    layout = read_model_config(check_folder(folder), folder / "config.json").layout
    wants_head = output_name == "logits"
    if wants_head and not LAYOUTS[layout].has_head:
        raise ConversionError(
            f"{folder}: a folder of the {layout} layout is the encoder alone, which predicts no tokens; use "
            "--task feature-extraction."
        )
    model = load_model(folder) if wants_head else load_backbone(folder)
    refuse_too_large(model, folder)
    return OneOutput(model, output_name).eval()


def refuse_too_large(model: torch.nn.Module, folder: Path) -> None:
    """Raises:
    ConversionError: The weights do not fit into one file.
    """
    size = sum(parameter.nbytes for parameter in model.parameters())
    if size > LARGEST_BYTES:
        raise ConversionError(
            f"{folder}: {size:,} bytes of weights in fp32 are more than the {LARGEST_BYTES:,} that one ONNX file holds."
        )


def write_graph(model: OneOutput, path: Path, *, opset: int) -> None:
    """Traces the model and writes its graph.

    Attention is traced in its plain form: PyTorch's fused one becomes the same matrix products, with a guard against
    rows of NaN around each softmax that this model's masks cannot cause.
    """
    lengths = torch.tensor(_TRACED_LENGTHS)
    mask_bs = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    usual = model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    with _quiet():
        program = torch.onnx.export(
            model,
            kwargs={"input_ids": mask_bs.clone(), "attention_mask": mask_bs},
            input_names=INPUTS,
            output_names=[model.output_name],
            dynamic_shapes=dict.fromkeys(INPUTS, axes),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    model.model.set_attn_implementation(usual)
    assert program is not None, "torch.onnx.export gives None only with dynamo=False"
    if program.model.opset_imports[""] != opset:  # what the exporter falls back to where a conversion fails
        raise ConversionError(
            f"torch {torch.__version__} cannot write this graph with --opset {opset}, only with "
            f"{program.model.opset_imports['']}."
        )
    program.save(path, external_data=False)


def quantize(plain: Path, quantized: Path) -> None:
    """Writes `plain` with 8-bit weights, a scale for each output channel; activations are rounded while running.

    Signed weights run twice as fast as unsigned ones where the processor has VNNI; where it has not, sums may saturate
    and the error be larger than the one measured here.
    """
    with _quiet():
        quantize_dynamic(plain, quantized, weight_type=QuantType.QInt8, per_channel=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what the libraries say about themselves: packages that are not needed, axes that share a name."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
