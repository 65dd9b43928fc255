"""The optimizer of a run: Megatron's AdamW, with torch's fused kernel where there is no better one, or Muon.

Muon is torch's inside Megatron's optimizer: Megatron builds its AdamW for two parts of the model, and the inner
optimizer of the layers' matrices is replaced. Main weights, gradients, schedule and checkpoints stay Megatron's, whose
own Muon needs a package that no index has for all supported Pythons. A matrix is orthogonalized as it is stored, q, k
and v together; so tensor parallelism and the distributed optimizer, which cut matrices, are refused.

Source: arXiv 2502.16982 (update scaled to the root mean square of AdamW's, so that its rate and weight decay fit);
megatron-core 0.16.1 core/optimizer/muon.py for which parameters are whose.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch.nn import Parameter
from torch.optim.adam import adam

from megatron_neobert.config.schema import Settings
from megatron_neobert.state import Run

_ADAM_ALONE = ("betas", "eps", "bias_correction", "step")


def build_optimizer(settings: Settings, model: DistributedDataParallel) -> Any:
    """Build Megatron's optimizer over all parameters. Collective: all ranks."""
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        megatron_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = True
        distrib_optimizer.USING_TE_OPTIMIZER = True
    cfg = settings.optimizer
    config = MegatronOptimizerConfig(
        optimizer="adam",
        decoupled_weight_decay=cfg.optimizer != "adam",
        lr=cfg.lr,
        min_lr=cfg.min_lr,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.adam_beta1,
        adam_beta2=cfg.adam_beta2,
        adam_eps=cfg.adam_eps,
        clip_grad=cfg.clip_grad,
        bf16=settings.training.bf16,
        params_dtype=torch.bfloat16 if settings.training.bf16 else torch.float32,
        use_distributed_optimizer=settings.parallel.use_distributed_optimizer,
        overlap_param_gather=model.ddp_config.overlap_param_gather,
        fp8_recipe=settings.compute.fp8_recipe if settings.compute.fp8_format is not None else None,
    )
    overrides: dict[ParamKey, ParamGroupOverride] = {}  # an empty table decays all, as the paper's code does
    if cfg.weight_decay_scope == "matrices":
        vectors = ParamPredicate(name="vectors", fn=lambda parameter: parameter.dim() == 1)
        overrides[ParamKey(predicate=vectors)] = ParamGroupOverride(wd_mult=0.0)
    build = partial(get_megatron_optimizer, config, [model], config_overrides=overrides, use_gloo_process_groups=True)
    return build_with_muon(build, model) if cfg.optimizer == "muon" else build()


def build_scheduler(settings: Settings, optimizer: Any) -> OptimizerParamScheduler:
    cfg = settings.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=cfg.lr,
        min_lr=cfg.min_lr,
        lr_warmup_steps=cfg.lr_warmup_iters,
        lr_decay_steps=settings.lr_decay_end,
        lr_decay_style=cfg.lr_decay_style,
        start_wd=cfg.weight_decay,
        end_wd=cfg.weight_decay,
        wd_incr_steps=settings.training.train_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        wsd_decay_steps=cfg.lr_wsd_decay_iters,
        lr_wsd_decay_style=cfg.lr_wsd_decay_style,
    )


def update_weights(run: Run, grad_norm: float) -> None:
    """Clip the gradients, which are ready, and update the weights. Collective: all ranks.

    These are the steps of megatron.core's ChainedOptimizer.step once the norm is known; no other step may come between.
    """
    scale = run.settings.optimizer.clip_grad / (grad_norm + 1e-6)  # Megatron's and torch's epsilon
    for one in run.optimizer.chained_optimizers:
        gradients = [parameter.grad for parameter in one.get_parameters() if parameter.grad is not None]
        if gradients and 0 < scale < 1:  # a limit of 0 switches clipping off
            torch._foreach_mul_(gradients, scale)
    run.optimizer.step_with_ready_grads()


def build_with_muon(build: Callable[[], ChainedOptimizer], model: torch.nn.Module) -> Any:
    """Return Muon over the matrices of the layers and AdamW over the rest, both inside Megatron's optimizers.

    `build` builds Megatron's AdamW over the parameters that require gradients. Collective: all ranks.
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
    """Return whether Muon updates a parameter. Embeddings and the decoder are matrices as well, and AdamW's."""
    return ".layers." in name and parameter.dim() == 2


@contextmanager
def _frozen(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Hide parameters from Megatron, which leaves out those that require no gradient."""
    frozen = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = True


def _start_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Allocate zero momentum buffers, so that a checkpoint has tensors to load into before the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW on torch's fused kernel, with the state layout of Transformer Engine's FusedAdam.

    Megatron's distributed optimizer cannot load the state of torch's AdamW: that keeps one `step` tensor per parameter,
    and all parameters would get the same one. Checkpoints of both are interchangeable.

    State per parameter: `exp_avg`, `exp_avg_sq`; per group: `step`, counted once for all its parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,  # in a CUDA graph, which this is never part of
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:  # a rank of the distributed optimizer may hold none of a group
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param] = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            states = [self.state[param] for param in params]
            adam(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                # torch counts these up itself before the update; one tensor's views, since each new one is a launch
                list(torch.full((len(params),), float(group["step"] - 1), device=params[0].device).unbind()),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )
