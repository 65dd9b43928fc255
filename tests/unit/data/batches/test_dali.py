"""The DALI loader gives the steps of the default loader, bit for bit. Runs on the CPU; needs the package alone."""

import importlib.util
import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch
from unit.data.corpus.memory_corpus import MemoryCorpus, batch_settings, web_like_lengths

from megatron_neobert.data.batches.dali import DaliLoader
from megatron_neobert.data.batches.loader import build_loader
from megatron_neobert.data.batches.rows import Cursor, Source
from megatron_neobert.data.batches.stream import BatchStream, StepBatches
from megatron_neobert.errors import CheckpointError, ConfigError

HAS_DALI = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="nvidia-dali-cuda130 is not installed")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stream() -> BatchStream:
    return BatchStream((Source(MemoryCorpus(web_like_lengths(300)), range(300)),), batch_settings(seq_length=256))


def contents(steps: list[StepBatches]) -> list:
    def plain(value: object) -> object:
        return (value.device.type, value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value

    return [
        (step.cursor_after, [[plain(value) for value in vars(batch).values()] for batch in step.micro_batches])
        for step in steps
    ]


def take(stream: BatchStream, number: int, *, num_workers: int = 0) -> list[StepBatches]:
    return list(islice(DaliLoader(stream, num_workers=num_workers, device=CPU), number))


@needs_dali
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_steps_equal_those_of_the_default_loader_though_all_are_kept(stream, num_workers):
    expected = contents(list(islice(build_loader(stream, num_workers=0), 25)))
    assert len({len(labels) for _, batches in expected for _, (_, _, labels), *_ in batches}) > 1  # shapes do vary
    assert contents(take(stream, 25, num_workers=num_workers)) == expected


@needs_dali
def test_the_cursor_of_the_last_step_taken_continues_a_pipeline_that_ran_ahead(stream):
    taken = take(stream, 3, num_workers=2)
    resumed = replace(stream, cursor=taken[-1].cursor_after)
    assert contents(take(resumed, 20, num_workers=2)) == contents(list(islice(stream.steps(), 3, 23)))


@needs_dali
def test_an_error_in_a_worker_keeps_its_class_and_its_sentence(stream):
    with pytest.raises(CheckpointError, match="at row 9,999 of window 0, which has"):
        take(replace(stream, cursor=Cursor(0, 0, 9999)), 1, num_workers=1)


@needs_dali
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_on_the_gpu_equal_those_of_the_default_loader(stream):
    device = torch.device("cuda", 0)
    loaded = list(islice(DaliLoader(stream, num_workers=1, device=device), 25))
    expected = list(islice(build_loader(stream, num_workers=0), 25))
    moved = [replace(step, micro_batches=[batch.to(device) for batch in step.micro_batches]) for step in expected]
    assert contents(loaded) == contents(moved)


def test_without_dali_the_package_and_its_pip_line_are_named(stream, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # as import finds it where it is not installed
    with pytest.raises(ConfigError, match=r"nvidia-dali-cuda130; .*pip install 'megatron-neobert\[dali\]'"):
        DaliLoader(stream, num_workers=0, device=CPU)
