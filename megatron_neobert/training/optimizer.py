"""The optimizer of a run: Megatron's AdamW or Adam, or Muon.

Adam uses torch's fused kernel (`FusedAdam`), whichever packages are installed.

Muon is torch's Muon inside Megatron's optimizer, because Megatron's Muon needs a package that is not published for all
supported Python versions. Megatron builds an AdamW for the matrices of the layers and another one for all other
parameters, and the inner optimizer of the first is replaced. Main weights, gradients, schedule and checkpoints remain
Megatron's. Muon orthogonalizes whole matrices as they are stored, with queries, keys and values together. So
config/rules.py refuses Muon with tensor parallelism, which splits matrices. For the same reason, Muon never uses the
distributed optimizer.

Source: arXiv 2502.16982 (updates scaled to the root mean square of AdamW's, so that the learning rate and weight decay
of AdamW fit); megatron-core 0.16.1 core/optimizer/muon.py for the parameters that Muon updates.
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

_ADAM_OPTIONS = ("betas", "eps", "bias_correction", "step")  # options of a parameter group that Muon does not have


def build_optimizer(settings: Settings, model: DistributedDataParallel) -> Any:
    """Build the optimizer for all parameters: Megatron's Adam or AdamW, or Muon combined with AdamW.

    Collective: all ranks.
    """
    # Megatron then uses FusedAdam in the code path for Transformer Engine's optimizer, which runs on CUDA only.
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
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_param_gather=model.ddp_config.overlap_param_gather,
        fp8_recipe=settings.compute.fp8_recipe if settings.compute.fp8_format is not None else None,
    )
    # Without an override, weight decay applies to all parameters, as in the paper's code.
    overrides: dict[ParamKey, ParamGroupOverride] = {}
    if cfg.weight_decay_scope == "matrices":
        vectors = ParamPredicate(name="vectors", fn=lambda parameter: parameter.dim() == 1)
        overrides[ParamKey(predicate=vectors)] = ParamGroupOverride(wd_mult=0.0)
    build = partial(get_megatron_optimizer, config, [model], config_overrides=overrides, use_gloo_process_groups=False)
    return _build_with_muon(build, model) if cfg.optimizer == "muon" else build()


def build_scheduler(settings: Settings, optimizer: Any) -> OptimizerParamScheduler:
    """Build Megatron's learning-rate scheduler, and set the first rate. One scheduler step is one iteration."""
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
    """Clip the gradients, whose norm over all ranks is `grad_norm`, in place and update the weights.

    Call `compute_gradients` before. Collective: all ranks.
    """
    # These are the remaining steps of ChainedOptimizer.step in megatron.core, once the norm is known.
    scale = run.settings.optimizer.clip_grad / (grad_norm + 1e-6)  # the epsilon of Megatron and torch
    for optimizer in run.optimizer.chained_optimizers:
        gradients = [parameter.grad for parameter in optimizer.get_parameters() if parameter.grad is not None]
        if gradients and 0 < scale < 1:  # --clip-grad 0 turns clipping off
            torch._foreach_mul_(gradients, scale)
    run.optimizer.step_with_ready_grads()


def _build_with_muon(build: Callable[[], ChainedOptimizer], model: torch.nn.Module) -> Any:
    """Return a Megatron optimizer with Muon for the matrices of the layers and AdamW for the other parameters.

    `build` builds Megatron's AdamW for all parameters that require gradients. Collective: all ranks.
    """
    # Embeddings and decoder are matrices, too, but AdamW updates them.
    matrices: list[Parameter] = []
    others: list[Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if ".layers." in name and parameter.dim() == 2 else others).append(parameter)
    with _frozen(others):
        muon = build()
    with _frozen(matrices):
        adamw = build()
    for optimizer in muon.chained_optimizers:
        groups = [
            {key: value for key, value in group.items() if key not in _ADAM_OPTIONS}
            for group in optimizer.optimizer.param_groups
        ]
        optimizer.optimizer = torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw")
        optimizer.init_state_fn = _start_momentum
    return ChainedOptimizer([*muon.chained_optimizers, *adamw.chained_optimizers])


@contextmanager
def _frozen(parameters: list[Parameter]) -> Iterator[None]:
    """Set `requires_grad` to False in the block and True afterwards. Megatron's optimizers skip frozen parameters."""
    for parameter in parameters:
        parameter.requires_grad = False
    yield
    for parameter in parameters:
        parameter.requires_grad = True


def _start_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Allocate zero momentum buffers, so that a checkpoint has tensors to load into before the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with torch's fused kernel, and the state that Megatron's distributed optimizer expects.

    A parameter's state is `exp_avg` and `exp_avg_sq`. A parameter group stores the number of steps once, as `step`;
    torch's own AdamW would store a `step` tensor for each parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,  # passed by Megatron; CUDA graphs are not used
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, in place. `closure` is not used."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:  # with the distributed optimizer, a rank may have no parameter of a group
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
                # Steps before this update; torch increments them. Views of one tensor need a single kernel launch.
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
