"""What a rank sets before it imports Megatron."""

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from megatron_neobert import pretrain
from megatron_neobert.config.schema import Settings
from megatron_neobert.model import kernels
from megatron_neobert.runtime.watcher import Watcher


def test_a_rank_chooses_its_gpu_and_one_compile_thread_before_the_hardware_is_examined(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", choose := Mock())
    monkeypatch.setattr(kernels, "check_hardware", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        pretrain.train(Settings(), Watcher(limit_seconds=600))
    choose.assert_called_once_with(3)
    read = "from torch._inductor import config; print(config.compile_threads)"
    printed = subprocess.run([sys.executable, "-c", read], env=os.environ, capture_output=True, check=True).stdout
    assert printed.split() == [b"1"]
