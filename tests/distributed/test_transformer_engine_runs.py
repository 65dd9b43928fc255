"""Runs with Transformer Engine's layers and optimizer, whose Python runs over an emulated extension on CPU."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import emulated_engine
import pytest
from emulated_engine import ENGINE, FP8
from processes import run_on_ranks
from ranks import quick_only, read_metrics, train_on_ranks
from reliability.states import assert_same_state
from test_layouts import CP2, TP2, largest_relative_gap
from test_megatron_lines import load_and_save
from tolerances import BF16_LAYOUT_LOSS, ENGINE_DELAYED_RESUMED, ENGINE_FP8_RUN

from megatron_neobert.checkpoint.folder import iteration_folder
from megatron_neobert.config.schema import Settings

pytestmark = emulated_engine.needs_sources

PRELOAD = {"preload": "emulated_engine.preloaded"}
train = partial(train_on_ranks, **PRELOAD)


@pytest.fixture
def run(settings: Callable[..., Settings]) -> Callable[..., Settings]:
    """Return a function that builds settings of a bf16 run, with shapes for all FP8 recipes; see `settings`."""

    def build(save: str, compute: dict[str, Any], **sections: dict[str, Any]) -> Settings:
        sections["training"] = {"bf16": True, **sections.get("training", {})}
        return settings(save, compute=compute, model={"hidden_size": 256}, **sections)

    return build


def last_checkpoint(settings: Settings) -> Path:
    return iteration_folder(Path(str(settings.checkpoint.save)), settings.training.train_iters)


@pytest.mark.parametrize("layout", [TP2, CP2, {}], ids=["tensor 2", "context 2", "data 2"])
def test_two_ranks_give_the_losses_of_one(run, layout):
    one, two = run("one", ENGINE), run("two", ENGINE, parallel=layout)
    train(one)
    train(two, world_size=2)
    gap = largest_relative_gap(read_metrics(one.checkpoint.save), read_metrics(two.checkpoint.save))
    print(f"{gap:.1e}")
    assert gap <= BF16_LAYOUT_LOSS.gate


def test_local_layers_train_the_same_with_transformer_engine_installed(settings):
    """Megatron would use its Adam, which needs CUDA."""
    installed, without = settings("installed"), settings("without")
    train(installed, world_size=2)
    train_on_ranks(without, world_size=2)
    assert largest_relative_gap(read_metrics(without.checkpoint.save), read_metrics(installed.checkpoint.save)) == 0


def test_checkpoint_keeps_every_bit_through_local_layers_and_back(run):
    engine = run("engine", ENGINE)
    train(engine)
    local, back = (
        run(name, compute).with_section("checkpoint", load=source)
        for name, compute, source in (("local", {}, engine.checkpoint.save), ("back", ENGINE, "local"))
    )
    back = back.with_section("checkpoint", load=local.checkpoint.save)
    run_on_ranks(load_and_save, local, world_size=1)
    run_on_ranks(load_and_save, back, world_size=1, **PRELOAD)
    for copy in (local, back):
        assert_same_state(last_checkpoint(copy), last_checkpoint(engine))


@pytest.mark.parametrize("recipe", quick_only(FP8, "delayed", "tensorwise"))
def test_a_run_in_fp8_has_nearly_the_losses_of_bf16_and_resumes(run, recipe):
    in_bf16, whole, resumed = run("bf16", ENGINE), run("whole", FP8[recipe]), run("resumed", FP8[recipe])
    train(in_bf16, world_size=2)
    train(whole, world_size=2)
    train(resumed.with_section("training", exit_interval=3), world_size=2)
    train(resumed, world_size=2)
    exact, fp8, after = (read_metrics(str(settings.checkpoint.save)) for settings in (in_bf16, whole, resumed))
    gap, resumed_gap = largest_relative_gap(exact, fp8), largest_relative_gap(fp8, after)
    print(f"{recipe}: bf16 {gap:.1e}, resumed {resumed_gap:.1e}")
    assert 0 < gap <= ENGINE_FP8_RUN.gate
    # A checkpoint does not have the scales of the delayed recipe.
    assert resumed_gap <= (ENGINE_DELAYED_RESUMED.gate if recipe == "delayed" else 0)
