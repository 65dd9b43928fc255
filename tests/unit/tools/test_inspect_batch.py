"""`neobert inspect batch`, as a user starts it."""

from dataclasses import asdict

from commands import call
from unit.inspection.small_runs import settings_of, write_checkpoint, write_corpora

from megatron_neobert.config.cli import write_record
from megatron_neobert.inspection.global_batch import rebuild_batch


def inspect(*arguments):
    """Run the command and return its output."""
    code, printed, errors = call("inspect batch", *arguments)
    assert (code, errors) == (0, "")
    return printed


def test_a_batch_is_the_same_from_a_checkpoint_and_from_the_start_for_any_layout(tmp_path):
    settings = settings_of(write_corpora(tmp_path))
    write_record(settings, tmp_path / "settings.yaml")
    cursor = asdict(rebuild_batch(settings, 5, checkpoint=None).cursor)
    write_checkpoint(tmp_path / "run", settings, iteration=4, cursor=cursor)
    config = ("--config", tmp_path / "settings.yaml", "--iteration", 6, "--rows", 8)
    layout = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    printed = inspect("--load", tmp_path / "run", *config[2:])
    assert printed == inspect(*config) == inspect(*config, "--load", tmp_path / "run") == inspect(*config, *layout)
    assert printed != inspect("--load", tmp_path / "run", *config[2:], "--seed", 1)
