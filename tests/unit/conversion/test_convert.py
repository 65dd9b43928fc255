"""Conversion: the folder is complete, right and loadable by anybody, or it does not exist."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from checkpoint_conversion import export
from checkpoint_conversion.eurobert import load_masked_lm
from checkpoint_conversion.export import export_eurobert
from checkpoint_conversion.megatron_reader import MegatronCheckpoint, read_checkpoint
from megatron_neobert.errors import CheckpointError, ConversionError, OutputError
from megatron_neobert.files import sha256_of

from .conftest import WORDS, SavedModel, stack_layers

REPOSITORY = Path(__file__).resolve().parents[3]
