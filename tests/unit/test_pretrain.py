"""What a rank sets before it imports Megatron."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_neobert import pretrain
from megatron_neobert.config import cli
from megatron_neobert.config.schema import Settings
from megatron_neobert.model import kernels


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
    command = SimpleNamespace(settings=Settings(), dry_run=False)
    monkeypatch.setattr(cli, "parse_command_line", lambda arguments, world_size: command)
    monkeypatch.setattr(pretrain.signals, "install_signal_handlers", lambda: None)
    with pytest.raises(Examined):
        pretrain.main()
    read = "from torch._inductor import config; print(config.compile_threads)"
    printed = subprocess.run([sys.executable, "-c", read], env=os.environ, capture_output=True, check=True).stdout
    assert printed.split() == [b"1"]
