"""NVTX ranges of a profile."""

from types import SimpleNamespace

import torch
from megatron.core import utils

from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig, Settings
from megatron_neobert.state import TrainState
from megatron_neobert.training.profile import profiled


def test_nvtx_ranges_end_with_the_profiled_iterations(tmp_path):
    settings = Settings(
        checkpoint=CheckpointConfig(save=str(tmp_path)),
        logging=LoggingConfig(profile="2-3"),
    )
    run = SimpleNamespace(settings=settings, state=TrainState(corpus_sha256=""), device=torch.device("cuda"))
    enabled = [utils._nvtx_enabled for _ in profiled(range(6), run, log=print)]
    assert enabled == [True] * 3 + [False] * 3
