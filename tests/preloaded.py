"""What the fork server of processes.py has imported before it forks: what most of the children need."""

import gc
import importlib
import sys

import torch

from megatron_neobert.model.kernels import import_megatron

import_megatron()
import pyarrow.parquet  # noqa: E402, F401
import pytest  # noqa: E402, F401
import transformers  # noqa: E402, F401

import megatron_neobert.training.loop  # noqa: E402, F401

MODULES_OF_A_RANK = frozenset(sys.modules)  # before its first optimizer
importlib.import_module("torch._dynamo")  # that optimizer would: half of the time of a tiny run

gc.freeze()  # or each collection, one per checkpoint, would go through all that was imported
torch.set_num_threads(1)  # a forked child must not wait for the threads of its parent
