"""The command `neobert export-onnx`: a Hugging Face folder as ONNX, for onnxruntime, transformers.js and optimum.

Writes onnx/model.onnx, in fp32 with batch and sequence of any size, and on request onnx/model_quantized.onnx with 8-bit
weights, beside config.json and the tokenizer: the places where those libraries look. A graph has the inputs input_ids
and attention_mask (int64, batch x sequence) and one output. Weights above 2 GB are in a file of their own beside it,
because protobuf ends there. onnxruntime runs every file on padded batches that the tracer has not seen; the folder gets
its name only if the fp32 file computes what PyTorch does. Full size takes a minute and 4 GB of memory.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_neobert.cli import option
from megatron_neobert.errors import ConversionError, MissingInputError, short_reason
from megatron_neobert.huggingface.checks import MODELING_FILE, check_folder
from megatron_neobert.runtime.atomic_files import build_folder, refuse_existing, require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from torch import Tensor

    from checkpoint_conversion.compare import Checks

TASKS = {"fill-mask": "logits", "feature-extraction": "last_hidden_state"}  # -> name of the graph's output
OPSET = 18  # the version of ONNX's operators that the most runtimes know; PyTorch cannot go below
INPUTS = ("input_ids", "attention_mask")

# Largest difference over largest value. 28 x 768 with random weights on CPU shows 5e-6 in fp32 and 0.17 in 8 bits, a
# graph that attends to padding 1. The second keeps out only what is broken: how much 8 bits may cost is for those who
# read the figures to decide.
TOLERANCE, TOLERANCE_INT8 = 1e-4, 0.5

# Tokens of each row, cut to what the model can read: rows and tokens differ, down to a row of one token and up to long
# ones, because a size that tracing has frozen shows at any other.
_BATCHES = ((1,), (7,), (64, 23), (40, 1, 17, 29, 33), (1024,))
_TRACED_LENGTHS = (11, 5, 8)  # of another batch than these; padded, so that the mask is part of the graph

_COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "LICENSE")
# sentence-transformers pools hidden states, which a fill-mask graph does not give.
_POOLING = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")


@dataclass(frozen=True, kw_only=True)
class OnnxOptions:
    """The command line of `neobert export-onnx`."""

    model: Path = option(help="Hugging Face folder that neobert convert wrote", metavar="DIR")
    output: Path = option(help="folder to create", metavar="DIR")
    task: str = option(
        "fill-mask",
        "fill-mask: logits of the masked-language-model head; feature-extraction: the last hidden state",
        choices=tuple(TASKS),
    )
    int8: bool = option(False, "8-bit weights in model_quantized.onnx; their error is measured")


def export_onnx(options: OnnxOptions) -> None:
    """Write a Hugging Face folder as ONNX, for onnxruntime, transformers.js and optimum, and check it against PyTorch.

    Raises:
        MissingInputError: The folder holds no model or no tokenizer.json.
        ConversionError: The model has no head for the task, or a graph computes something else.
        OutputError: The output exists or cannot be created.
    """
    require_folder("--model", options.model, holding="config.json")
    refuse_existing(options.output)  # before a minute of work
    import onnx  # noqa: F401 (what is missing is reported before the work)
    import onnxscript  # noqa: F401

    from checkpoint_conversion.compare import to_table

    model = load_for_task(options.model, options.task)
    with build_folder(options.output) as folder:
        copy_companions(options.model, folder, options.task)
        for path, batches in write_graphs(model, folder / "onnx", options.task, int8=options.int8).items():
            size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
            print(f"{path.name}, {size / 1e6:.1f} MB, against PyTorch by rows x tokens:")
            print(f"{to_table(batches)}\n")
    print(f"wrote {options.output}")


def load_for_task(folder: Path, task: str) -> Any:
    """Return the folder's model in fp32, with its masked-language-model head for fill-mask, else without.

    Raises:
        ConversionError: The folder holds no NeoBERT, or one without that head.
    """
    from transformers import AutoModel, AutoModelForMaskedLM

    from checkpoint_conversion.compare import load_model
    from checkpoint_conversion.config_json import read_model_config

    layout = read_model_config(check_folder(folder), folder / "config.json").layout
    if task == "fill-mask" and layout == "llama":
        raise ConversionError(
            f"{folder}: a folder of the {layout} layout is the encoder alone, which predicts no tokens; use "
            "--task feature-extraction."
        )
    return load_model(folder, AutoModelForMaskedLM if task == "fill-mask" else AutoModel)


def write_graphs(model: Any, folder: Path, task: str, *, int8: bool) -> "dict[Path, Checks]":
    """Write model.onnx, and model_quantized.onnx if wanted, and return how far each is from PyTorch.

    Raises:
        ConversionError: A graph computes something else.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    folder.mkdir()
    plain, quantized = folder / "model.onnx", folder / "model_quantized.onnx"
    trace(model, TASKS[task]).save(plain)
    checks = {plain: check_graph(model, plain, tolerance=TOLERANCE)}
    if int8:
        # Signed weights run twice as fast as unsigned ones where the processor has VNNI. Of 7 bits, because sums of
        # 8 saturate where it has not: logits were then off by 0.8 of the largest. Activations are rounded while
        # running.
        is_large = plain.with_name(f"{plain.name}.data").exists()
        options = {"per_channel": True, "reduce_range": True, "use_external_data_format": is_large}
        with _quiet():
            quantize_dynamic(plain, quantized, weight_type=QuantType.QInt8, **options)
        checks[quantized] = check_graph(model, quantized, tolerance=TOLERANCE_INT8)
    return checks


def trace(model: Any, output: str) -> Any:
    """Return the model as an ONNX program whose output has this name.

    Attention is traced in its plain form: PyTorch's fused one becomes the same matrix products, with a guard against
    rows of NaN around each softmax that this model's masks cannot cause.
    """
    import torch

    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    mask_bs = _mask(_TRACED_LENGTHS)
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with _quiet():
        program = torch.onnx.export(
            model,
            kwargs=dict(zip(INPUTS, (mask_bs.clone(), mask_bs), strict=True)),
            input_names=INPUTS,
            output_names=[output],
            dynamic_shapes=dict.fromkeys(INPUTS, axes),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    model.set_attn_implementation(usual)
    return program


def check_graph(model: Any, path: Path, *, tolerance: float) -> "Checks":
    """Return how far the graph's output in onnxruntime is from PyTorch's, by batch: "rows x tokens".

    Args:
        tolerance: Largest difference that is accepted, relative to the largest value.

    Raises:
        ConversionError: onnxruntime cannot run the graph, or a batch differs by more or is not finite.
    """
    import onnxruntime
    import torch

    from checkpoint_conversion.compare import compare_logits

    generator, session, checks = torch.Generator().manual_seed(0), None, {}
    for lengths in _BATCHES:
        mask_bs = _mask(lengths, longest=model.config.max_position_embeddings)
        tokens_bs = torch.randint(model.config.vocab_size, mask_bs.shape, generator=generator) * mask_bs
        inputs = dict(zip(INPUTS, (tokens_bs, mask_bs), strict=True))
        with torch.no_grad():
            expected = model(**inputs)[0]
        try:
            session = session or onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise ConversionError(
                f"{path.name}: onnxruntime {onnxruntime.__version__} cannot run it ({short_reason(error)})."
            ) from error
        batch = " x ".join(str(size) for size in mask_bs.shape)
        checks[batch] = compare_logits(expected, torch.tensor(found), mask_bs)
        if not checks[batch].within(tolerance):
            raise ConversionError(
                f"with {batch} tokens the graph's output differs from PyTorch's by {checks[batch].relative:.3g} of the "
                f"largest value, more than {tolerance:g}; nothing was written. Try the versions of torch and "
                "onnxruntime in constraints.txt."
            )
    return checks


def _mask(lengths: tuple[int, ...], *, longest: int = max(_TRACED_LENGTHS)) -> "Tensor":
    """Return the attention mask of rows that have so many tokens."""
    import torch

    lengths_b = torch.tensor(lengths).clamp(max=longest)
    return (torch.arange(int(lengths_b.max())) < lengths_b[:, None]).long()


def copy_companions(model: Path, folder: Path, task: str) -> None:
    """Write the files that readers of ONNX folders look for in the folder above the graphs.

    A config.json that names our modelling file gets that file of this package, for libraries that ask it for the
    configuration; a config.json that names other code loses the names, and the code stays behind.

    Raises:
        MissingInputError: The model has no tokenizer.json.
    """
    from checkpoint_conversion.export import modeling_source

    if not (model / "tokenizer.json").is_file():
        raise MissingInputError(f"{model}: has no tokenizer.json, without which the graph cannot be used; add it.")
    for name in (*_COMPANIONS, *(_POOLING if task == "feature-extraction" else ())):
        if (model / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(model / name, folder / name)
    config = check_folder(model)
    ours, named = MODELING_FILE.removesuffix("py"), config.get("auto_map")
    if isinstance(named, dict) and all(str(name).startswith(ours) for name in named.values()):
        (folder / MODELING_FILE).write_bytes(modeling_source())
    else:
        config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the libraries report about themselves: packages that are not needed, axes that share a name."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
