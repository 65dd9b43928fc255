"""What onnxruntime computes with a graph, held against PyTorch on padded batches that the tracer has not seen.

The batches differ in rows and in tokens, up to a row of one token and to long ones, because a size that tracing has
frozen shows at any other. Shapes: `b` rows, `s` tokens of a row, `v` channels of the output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from checkpoint_conversion.comparison import TOLERANCES, Comparison, Prompts, compare_logits
from megatron_neobert.errors import ConversionError, short_reason
from onnx_export.graph import INPUTS, OneOutput

# Largest difference over largest value. 28 x 768 with random weights on CPU shows 5e-6 in fp32 and 0.15 in 8 bits, a
# graph that attends to padding 1. The second line keeps out only what is broken: how much 8 bits may cost is for
# whoever reads the figures to say.
TOLERANCE = TOLERANCES[torch.float32]
TOLERANCE_INT8 = 0.5

# Tokens of each row, cut to what the model can read.
_BATCHES = ((1,), (7,), (64, 23), (40, 1, 17, 29, 33), (1024,))


@dataclass(frozen=True)
class GraphCheck:
    """How far a graph's output is from PyTorch's, batch by batch."""

    predicts: bool  # the output is logits, of which the largest is a prediction
    batches: dict[str, Comparison]  # by "rows x tokens"

    def to_report(self) -> dict[str, dict[str, float]]:
        return {batch: self._figures(found) for batch, found in self.batches.items()}

    def to_table(self) -> str:
        """One line per batch."""
        names = self._figures(next(iter(self.batches.values())))
        lines = ["".join([f"{'rows x tokens':<14}", *(f"{name.replace('_', ' '):>20}" for name in names)])]
        for batch, found in self.batches.items():
            lines.append("".join([f"{batch:<14}", *(f"{figure:>20.6g}" for figure in self._figures(found).values())]))
        return "\n".join(lines)

    def _figures(self, found: Comparison) -> dict[str, float]:
        figures = {"relative_difference": found.relative, "lowest_cosine": found.cosine}
        return figures | {"same_prediction": found.argmax_agreement} if self.predicts else figures


@torch.no_grad()
def check_graph(model: OneOutput, path: Path) -> GraphCheck:
    """Runs the graph of `path` and the model on each batch.

    Raises:
        ConversionError: onnxruntime cannot run the graph.
    """
    run = _load_graph(path)
    batches = {}
    for tokens_bs, mask_bs in build_batches(model.config.vocab_size, longest=model.config.max_position_embeddings):
        rows, tokens = tokens_bs.shape
        batches[f"{rows} x {tokens}"] = compare_logits(model(tokens_bs, mask_bs), run(tokens_bs, mask_bs), mask_bs)
    return GraphCheck(predicts=model.output_name == "logits", batches=batches)


def build_batches(vocab_size: int, *, longest: int) -> list[Prompts]:
    """Padded batches of random ids, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for row_tokens in _BATCHES:
        lengths = torch.tensor(row_tokens).clamp(max=longest)
        mask_bs = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        tokens_bs = torch.randint(vocab_size, mask_bs.shape, generator=generator)
        batches.append(Prompts(tokens_bs * mask_bs, mask_bs))
    return batches


def refuse_difference(check: GraphCheck, *, tolerance: float) -> None:
    """Raises:
    ConversionError: A batch differs by more, or is not finite; `tolerance` is relative to the largest value.
    """
    for batch, comparison in check.batches.items():
        if not comparison.within(tolerance):
            raise ConversionError(
                f"with {batch} tokens the graph's output differs from PyTorch's by {comparison.relative:.3g} of the "
                f"largest value, more than {tolerance:g}; nothing was written. torch is {torch.__version__} and "
                f"onnxruntime {onnxruntime.__version__}: try the versions in constraints.txt."
            )


def _load_graph(path: Path) -> Callable[[Tensor, Tensor], Tensor]:
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise _cannot_run(path, error) from error

    def run(tokens_bs: Tensor, mask_bs: Tensor) -> Tensor:
        inputs = dict(zip(INPUTS, (tokens_bs.numpy(), mask_bs.numpy()), strict=True))
        try:
            (output,) = session.run(None, inputs)
        except Exception as error:
            raise _cannot_run(path, error) from error
        return torch.from_numpy(np.asarray(output))

    return run


def _cannot_run(path: Path, error: Exception) -> ConversionError:
    reason = short_reason(error)
    return ConversionError(f"{path.name}: onnxruntime {onnxruntime.__version__} cannot run it ({reason}).")
