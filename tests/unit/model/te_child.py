"""Computes the cases of spec_cases.py with Transformer Engine's layers over the stand-in.

Megatron looks for Transformer Engine when it is imported, so this is a process of its own. Started by
test_transformer_engine_spec.py with the folder for the results.
"""

import os
import sys
from pathlib import Path

import te_stand_in

te_stand_in.install()

import torch  # noqa: E402
from spec_cases import CASES, VOCAB, build, compute, fill, load, save, settings_of, weights  # noqa: E402
from torch import multiprocessing  # noqa: E402

from megatron_neobert.model import layer_specs  # noqa: E402
from megatron_neobert.model.loss import masked_token_losses  # noqa: E402
from megatron_neobert.model.neobert import NeoBERTModel  # noqa: E402
from megatron_neobert.runtime import distributed  # noqa: E402
from megatron_neobert.training.setup import wrap_model  # noqa: E402


def main(folder: Path) -> None:
    multiprocessing.start_processes(compute_on_two_ranks, args=(folder,), nprocs=2, start_method="fork")
    distributed.initialize(settings_of("neobert", impl="transformer_engine"))
    for case in CASES:
        model = build(case, impl="transformer_engine")
        torch.save(compute(model), folder / f"{case}.pt")
        torch.save(sorted(model.sharded_state_dict()), folder / f"{case}_names.pt")
        load(model, folder / f"local_{case}")
        torch.save(weights(model), folder / f"{case}_loaded.pt")
        fill(model, 3.0)
        save(model, folder / f"engine_{case}")
    torch.save(te_stand_in.DotProductAttention.calls, folder / "attention_calls.pt")
    torch.save(compute_with_causal_attention(), folder / "causal.pt")
    torch.save(fused_losses(), folder / "fused_losses.pt")
    torch.save({str(fuses): accumulated_gradient(fuses=fuses) for fuses in (True, False)}, folder / "accumulated.pt")


def compute_on_two_ranks(rank: int, folder: Path) -> None:
    """Tensor and sequence parallelism; the losses are the same on both ranks."""
    os.environ["RANK"] = str(rank)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    distributed.initialize(settings_of("neobert", impl="transformer_engine", **layout))
    for case in ("neobert", "layer_norm"):
        model = build(case, impl="transformer_engine", **layout)
        marks = {name: parameter.sequence_parallel for name, parameter in model.named_parameters() if "norm" in name}
        torch.save((compute(model), marks), folder / f"{case}_rank{rank}.pt")
    distributed.shut_down()


def compute_with_causal_attention() -> dict[str, torch.Tensor]:
    """The negative control: what Megatron's own spec for Transformer Engine has by default."""
    mask = layer_specs.AttnMaskType
    layer_specs.AttnMaskType = type("Causal", (), {"padding": mask.causal})
    try:
        return compute(build("neobert", impl="transformer_engine"))
    finally:
        layer_specs.AttnMaskType = mask


def accumulated_gradient(*, fuses: bool) -> torch.Tensor:
    """Of one projection over eight micro-batches in bfloat16, as the optimizer gets it."""
    settings = settings_of("neobert", impl="transformer_engine").with_section("training", bf16=True)
    settings = settings.with_section("compute", gradient_accumulation_fusion=fuses)
    model = wrap_model(settings, NeoBERTModel(settings, vocab_size=VOCAB), is_first_chunk=True)
    for _ in range(8):
        compute(model.module.module)
    (weight,) = (one for name, one in model.named_parameters() if name.endswith("layers.0.mlp.linear_fc2.weight"))
    return weight.main_grad.clone()


def fused_losses() -> dict[str, torch.Tensor]:
    """Transformer Engine's cross-entropy as our loss calls it, a filler among the labels."""
    config = build("neobert", impl="transformer_engine").config
    config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = True, "te"
    logits_mv = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1), requires_grad=True)
    losses_m, correct_m = masked_token_losses(logits_mv.clone(), torch.tensor([3, 7, -100, 11]), config)
    losses_m.sum().backward()
    return {"logits": logits_mv.detach(), "losses": losses_m.detach(), "correct": correct_m, "gradient": logits_mv.grad}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
