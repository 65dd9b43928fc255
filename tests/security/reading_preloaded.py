"""Import the packages of all commands that read folders, so that processes of the fork server start quickly."""

import gc

import datasets  # noqa: F401
import mteb.benchmarks.benchmarks  # noqa: F401
import onnxruntime  # noqa: F401
import onnxscript  # noqa: F401
import preloaded  # noqa: F401
import sentence_transformers  # noqa: F401
import seqeval.metrics  # noqa: F401
import sklearn.metrics  # noqa: F401
import torch.onnx  # noqa: F401

import megatron_neobert.commands.convert
import megatron_neobert.evaluation.mteb
import megatron_neobert.evaluation.plots  # noqa: F401

gc.freeze()
