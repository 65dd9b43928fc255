"""Training continues from converted weights without losing a bit, and checkpoints are read as they were trained."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import read_metrics, train_on_ranks
from test_layouts import TP2
from tolerances import MEGATRON_LOGITS

from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.export import export
from checkpoint_conversion.imports import import_folder
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.config.schema import Settings

STOP = 3


@pytest.fixture
def imported(settings: Any, tmp_path: Path) -> str:
    """Weights of a run of three iterations, exported to Hugging Face and imported again. The run is in `first`."""
    run = settings("first", training={"exit_interval": STOP})
    train_on_ranks(run)
    export(read_checkpoint(Path(run.checkpoint.save)), tmp_path / "model")
    import_folder(tmp_path / "model", tmp_path / "imported")
    return str(tmp_path / "imported")


def continued(run: Settings, source: str, **training: Any) -> Settings:
    run = run.with_section("checkpoint", continue_from=source)
    return run.with_section("training", **training)


@pytest.mark.parametrize("parallel", [TP2, pytest.param({}, marks=pytest.mark.slow)])
def test_converted_weights_give_the_loss_of_the_original_weights(
    settings: Any, imported: str, tmp_path: Path, parallel: dict[str, Any]
):
    # With another seed, the data start again, as they do with converted weights. So both runs read the same batch.
    whole = continued(settings("whole"), str(tmp_path / "first"), exit_interval=STOP + 1, seed=1)
    train_on_ranks(whole)
    run = continued(settings("second", parallel=parallel), imported, exit_interval=2, seed=1)
    train_on_ranks(run, world_size=2)
    expected, loss = read_metrics(whole.checkpoint.save)[STOP + 1], read_metrics(run.checkpoint.save)[1]
    assert loss == pytest.approx(expected, rel=1e-6)  # other layouts add in another order
    initial_loss = read_metrics(tmp_path / "first")[1]
    assert abs(initial_loss - expected) > 1e-3 * expected, "initial weights must give another loss"


def test_bfloat16_run_keeps_the_converted_weights_in_float32_and_is_read_with_them(settings: Any, imported: str):
    run = continued(settings("second", optimizer={"lr": 0.0, "min_lr": 0.0}), imported, exit_interval=1, bf16=True)
    train_on_ranks(run)
    expected, tensors = (read_checkpoint(Path(folder)).tensors for folder in (imported, run.checkpoint.save))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in expected.values()), "the control"


def test_converted_weights_in_load_are_refused_with_the_right_flag(settings: Any, imported: str):
    run = settings("second").with_section("checkpoint", load=imported)
    with pytest.raises(Exception, match=r"has no optimizer state .* give it as --continue-from"):
        train_on_ranks(run)


LENGTHS = (9, 1, 30, 4)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
TOKENS = torch.randint(280, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def note_logits(path: Path) -> None:
    """Let this process write the logits of its model when it saves a checkpoint."""
    save = Saver.save

    @torch.no_grad()
    def save_and_note(saver: Saver) -> None:
        logits = saver.run.unwrapped_model(TOKENS, STARTS, max(LENGTHS), torch.arange(len(TOKENS)))
        torch.save(logits[:, : saver.run.tokenizer.vocab_size].clone(), path)
        save(saver)

    Saver.save = save_and_note


def test_reference_with_saved_weights_gives_megatron_s_logits(settings, tmp_path):
    run = settings("run", model={"init_method_range": 0.5}, optimizer={"lr": 0.1})
    train_on_ranks(run, prepare=partial(note_logits, tmp_path / "logits.pt"))
    reference = read_checkpoint(Path(run.checkpoint.save)).build_reference(torch.float32)
    with torch.no_grad():
        logits = reference.forward_packed(TOKENS, STARTS)
    expected = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert expected.abs().max() > 3, "logits too small to show an error"
    assert (logits - expected).abs().max() / expected.abs().max() <= MEGATRON_LOGITS.gate
