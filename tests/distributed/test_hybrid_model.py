"""NeoBERT on `HybridModel`, to which megatron.core 0.19 announces that `GPTModel` will give way.

A layer of attention and MLP stands in the slot that HybridModel has for attention, so parameters and names stay. Its
stack builds Transformer Engine's norm by itself and stores layer by layer: both are replaced by what GPTModel has.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from ranks import read_metrics, train_on_ranks
from reliability.states import assert_same_state
from test_layouts import LAYOUTS, run_of

from megatron_neobert.checkpoint.folder import iteration_folder
from megatron_neobert.model.neobert import NeoBERTModel

hybrid_model = pytest.importorskip(
    "megatron.core.models.hybrid.hybrid_model", reason="this megatron.core has no HybridModel", exc_type=ImportError
)


def build_on_hybrid_model(mark: Path) -> None:
    """From here on this process builds NeoBERTModel with the other base class, and leaves a mark when it does."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock

    class Stack(HybridStack):
        def __init__(self, config: Any, submodules: Any, *, final_norm: Any, **rest: Any) -> None:
            super().__init__(config, submodules, post_layer_norm=False, **rest)
            self.vp_stage = None
            if self.post_process:
                self.final_layernorm = final_norm(config, config.hidden_size, config.layernorm_epsilon)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            hidden = super().forward(*args, **kwargs)
            return self.final_layernorm(hidden) if self.post_process else hidden

        sharded_state_dict = TransformerBlock.sharded_state_dict

    class Base(hybrid_model.HybridModel):
        """Takes the arguments of GPTModel."""

        def __init__(self, config: Any, transformer_layer_spec: Any, **rest: Any) -> None:
            per_stage = len(transformer_layer_spec.layer_specs)
            stack = ModuleSpec(
                module=Stack,
                params={"final_norm": transformer_layer_spec.layer_norm},
                submodules=HybridStackSubmodules(attention_layer=transformer_layer_spec.layer_specs[0]),
            )
            pattern = "|".join(["*" * per_stage] * (config.num_layers // per_stage))
            super().__init__(config, stack, hybrid_layer_pattern=pattern, **rest)
            mark.touch()

    NeoBERTModel.__bases__ = (Base,)


@pytest.mark.parametrize("name", ["pipeline 2", "tensor 2", "recomputed layers"])
def test_on_hybrid_model_losses_and_checkpoints_are_those_of_gpt_model_bit_for_bit(tiny_corpus, tmp_path, name):
    layout = LAYOUTS[name]
    saves = {"gpt": tmp_path / "gpt", "hybrid": tmp_path / "hybrid"}
    for base, save in saves.items():
        train_on_ranks(
            run_of(tiny_corpus, save, layout=layout).with_section("training", train_iters=6, eval_interval=6),
            world_size=layout.ranks,
            prepare=functools.partial(build_on_hybrid_model, tmp_path / "built") if base == "hybrid" else None,
        )
    assert (tmp_path / "built").exists()
    for key in ("loss", "grad_norm"):
        assert read_metrics(saves["hybrid"], key) == read_metrics(saves["gpt"], key)
    assert_same_state(*(iteration_folder(save, 6) for save in saves.values()))
