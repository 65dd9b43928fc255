"""Which checkpoint and which settings belong to an iteration of a run."""

from dataclasses import replace

import pytest
from unit.inspection.batch_places import settings_of

from megatron_neobert.config.cli import write_record
from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig
from megatron_neobert.errors import MissingInputError
from megatron_neobert.inspection.found_batch import (
    checkpoint_before,
    replace_by_flags,
    settings_of_iteration,
    without_outputs,
)


def save_all(save, settings_by_iteration):
    for iteration, settings in settings_by_iteration.items():
        folder = save / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        write_record(settings, folder / "settings.yaml")
        (folder / "MANIFEST.json").touch()


@pytest.fixture
def settings(place):
    return settings_of(place)


def test_the_way_begins_at_the_newest_checkpoint_before_the_iteration(tmp_path, settings):
    save_all(tmp_path, dict.fromkeys((10, 20, 30), settings))
    found = [checkpoint_before(tmp_path, iteration) for iteration in (10, 11, 20, 21, 31)]
    assert [folder and folder.name for folder in found] == [
        None, "iter_0000010", "iter_0000010", "iter_0000020", "iter_0000030"
    ]  # fmt: skip


def test_settings_are_those_of_the_first_checkpoint_behind_the_iteration(tmp_path, settings):
    by_iteration = {at: settings.with_section("training", seed=at) for at in (10, 20, 30)}
    save_all(tmp_path, by_iteration)
    assert [settings_of_iteration(tmp_path, at).training.seed for at in (1, 10, 11, 30, 31)] == [10, 10, 20, 30, 30]


def test_an_iteration_whose_data_cannot_be_known_is_refused(tmp_path, settings):
    with pytest.raises(MissingInputError, match="holds no checkpoint"):
        checkpoint_before(tmp_path, 1)
    save_all(tmp_path, {10: settings.with_section("checkpoint", continue_from="elsewhere")})
    with pytest.raises(MissingInputError, match="no checkpoint before iteration 10, and its data did not begin"):
        checkpoint_before(tmp_path, 10)


def test_flags_replace_what_they_name_and_what_a_run_saves_is_left_out(tmp_path, settings):
    saved = settings.with_section("training", exit_interval=5)
    saved = replace(saved, checkpoint=CheckpointConfig(save=str(tmp_path)), logging=LoggingConfig(log_interval=7))
    assert without_outputs(saved) == settings
    assert replace_by_flags(settings, ["--seed", "3"], world_size=1) == settings.with_section("training", seed=3)
