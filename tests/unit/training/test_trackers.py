"""W&B that does not start says why, in a sentence."""

import pytest

from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig, Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.training.trackers import WandbRun

pytest.importorskip("wandb")


def start(save: object) -> None:
    settings = Settings(checkpoint=CheckpointConfig(save=str(save)), logging=LoggingConfig(wandb_project="books"))
    WandbRun(settings, log=print)


def test_a_wrong_variable_of_wandb_is_named_with_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match=r"did not start \(.* mode Input .*'nonsense'.*correct what it names"):
        start(tmp_path)


@pytest.mark.parametrize("content", [b"", b"a b\n", b"\xff\xfe", b"../x", b"a" * 99])
def test_a_damaged_id_is_refused_with_the_file_that_holds_it(content, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    path = tmp_path / "wandb_id.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path} holds .*; write the id .* or delete the file"):
        start(tmp_path)
