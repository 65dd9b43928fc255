"""Muon for the matrices of the layers, AdamW for all other parameters: torch's Muon inside Megatron's optimizer.

Megatron's own way to Muon needs a package that no index has for all supported Pythons. Here Megatron builds its AdamW
for the two parts of the model, and the first one's inner optimizer is replaced: main weights, gradients, schedule and
checkpoints stay Megatron's. A matrix is orthogonalized as it is stored, so queries, keys and values together, and
SwiGLU's two halves together; that is why tensor parallelism and the distributed optimizer, which cut matrices, are
refused. The momentum is torch's 0.95, with Nesterov's step. Every replica computes all updates.

Source: arXiv 2502.16982 (update scaled to the root mean square of AdamW's, so that its rate and weight decay fit);
megatron-core 0.16.1 core/optimizer/muon.py for which parameters are whose.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch.nn import Parameter

_ADAM_ALONE = ("betas", "eps", "bias_correction", "step")


def build_with_muon(build: Callable[[], ChainedOptimizer], model: torch.nn.Module) -> Any:
    """Megatron's optimizers, one after the other: Muon over the matrices of the layers, then AdamW.

    Args:
        build: Builds Megatron's AdamW over the parameters that require gradients.

    Collective: all ranks.
    """
    named = list(model.named_parameters())
    with _frozen(parameter for name, parameter in named if not is_matrix_of_layer(name, parameter)):
        with_muon = build()
    with _frozen(parameter for name, parameter in named if is_matrix_of_layer(name, parameter)):
        with_adamw = build()
    for optimizer in with_muon.chained_optimizers:
        groups = [
            {key: value for key, value in group.items() if key not in _ADAM_ALONE}
            for group in optimizer.optimizer.param_groups
        ]
        optimizer.optimizer = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")
        optimizer.init_state_fn = _start_momentum
    return ChainedOptimizer([*with_muon.chained_optimizers, *with_adamw.chained_optimizers])


def is_matrix_of_layer(name: str, parameter: Parameter) -> bool:
    """Whether Muon updates it; embeddings and the decoder are matrices as well, and AdamW's."""
    return ".layers." in name and parameter.dim() == 2


@contextmanager
def _frozen(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Megatron leaves parameters out that require no gradient."""
    frozen = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = True


def _start_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """What a checkpoint is read into, before the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
