"""Muon updates the matrices of layers like torch's Muon, and AdamW the rest; weight decay follows its flags."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import read_metrics, train_on_ranks
from tests_tiny import ITERATIONS

from megatron_neobert.checkpoint.contents import StoredTensors
from megatron_neobert.state import Run
from megatron_neobert.training import step

MUON = {"optimizer": {"optimizer": "muon"}, "model": {"num_layers": 4}}


def compare_each_update_with_torch(momentum: float = 0.95) -> None:
    """Give the same gradients to torch's Muon and AdamW, and compare all weights after each update of this process."""
    update = step.update_weights
    copies: dict[str, torch.Tensor] = {}
    optimizers: list[torch.optim.Optimizer] = []

    def compare(run: Run, grad_norm: float) -> None:
        parameters = dict(run.unwrapped_model.named_parameters())
        cfg = run.settings.optimizer
        if not copies:
            copies.update({name: parameter.detach().clone() for name, parameter in parameters.items()})
            matrices = [name for name in copies if name.startswith("decoder.layers.") and "norm" not in name]
            assert len(matrices) == 4 * run.settings.model.num_layers
            optimizers.append(
                torch.optim.Muon(
                    [copies[name] for name in matrices],
                    momentum=momentum,
                    weight_decay=cfg.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
            optimizers.append(
                torch.optim.AdamW(
                    [copies[name] for name in copies if name not in matrices],
                    betas=(cfg.adam_beta1, cfg.adam_beta2),
                    eps=cfg.adam_eps,
                    weight_decay=cfg.weight_decay,
                )
            )
        for name, copy in copies.items():
            copy.grad = parameters[name].grad * min(1.0, cfg.clip_grad / (grad_norm + 1e-6))
        rate = run.optimizer.param_groups[0]["lr"]
        update(run, grad_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        torch.testing.assert_close(parameters, copies, rtol=1e-5, atol=1e-6)

    step.update_weights = compare


def test_every_update_equals_torch_s_muon_and_adamw(settings):
    train_on_ranks(settings("muon", **MUON), prepare=compare_each_update_with_torch)
    with pytest.raises(Exception, match=r"(?s)not close.*item \['decoder\.layers\.0\."):
        train_on_ranks(settings("control", **MUON), prepare=partial(compare_each_update_with_torch, momentum=0.94))


def test_weight_decay_applies_to_vectors_only_with_scope_all(settings):
    """An update without decay changes a norm weight by about 2e-3, and this decay by up to a tenth."""
    means = {}
    for scope in ("all", "matrices"):
        run = settings(scope, optimizer={"weight_decay": 50.0, "weight_decay_scope": scope})
        train_on_ranks(run)
        stored = StoredTensors(Path(run.checkpoint.save) / f"iter_{ITERATIONS:07d}")
        means[scope] = stored.read_whole("decoder.final_layernorm.weight").mean().item()
    # A weight of 1 after all updates of the decay alone.
    decayed = math.prod(1 - 50 * rate for rate in read_metrics(run.checkpoint.save, "lr").values())
    assert decayed < 0.85
    assert means["all"] == pytest.approx(decayed, abs=0.02)
    assert means["matrices"] == pytest.approx(1.0, abs=0.02)
