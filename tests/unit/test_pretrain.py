"""What a rank sets before it imports Megatron."""

import os
import subprocess
import sys

import pytest
import torch

from megatron_neobert import pretrain
from megatron_neobert.config.schema import Settings
from megatron_neobert.model import kernels
from megatron_neobert.runtime.watcher import Watcher


class Examined(Exception):
    """Raised where the hardware is examined."""


def test_a_rank_chooses_its_gpu_and_one_compile_thread_before_the_hardware_is_examined(monkeypatch):
    chosen: list[int] = []

    def check_hardware(settings):
        assert chosen == [3]
        raise Examined

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(kernels, "check_hardware", check_hardware)
    with pytest.raises(Examined):
        pretrain.train(Settings(), Watcher(limit_seconds=600))
    read = "from torch._inductor import config; print(config.compile_threads)"
    printed = subprocess.run([sys.executable, "-c", read], env=os.environ, capture_output=True, check=True).stdout
    assert printed.split() == [b"1"]
