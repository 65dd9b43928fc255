"""What the fork server of processes.py has imported before it forks: what most of the children need."""

import torch

from megatron_neobert.runtime.megatron_imports import import_megatron

import_megatron()
import pyarrow.parquet  # noqa: E402, F401
import pytest  # noqa: E402, F401
import transformers  # noqa: E402, F401

import megatron_neobert.training.loop  # noqa: E402, F401

torch.set_num_threads(1)  # a forked child must not wait for the threads of its parent
