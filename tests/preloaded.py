"""What the fork server of processes.py has imported before it forks: what most of the children need."""

import gc

import torch
import torch._dynamo  # the first optimizer of a process would: half of the time of a tiny run

from megatron_neobert.runtime.megatron_imports import import_megatron

import_megatron()
import pyarrow.parquet  # noqa: E402, F401
import pytest  # noqa: E402, F401
import transformers  # noqa: E402, F401

import megatron_neobert.training.loop  # noqa: E402, F401

gc.freeze()  # or each collection, one per checkpoint, would go through all that was imported
torch.set_num_threads(1)  # a forked child must not wait for the threads of its parent
