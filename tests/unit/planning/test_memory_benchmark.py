"""benchmarks/benchmark_memory.py at toy size, in processes of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run_command

from benchmarks import benchmark_memory
from megatron_neobert.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
# Two heads of 64 and two ranks that share them; too small for a peak that says anything.
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
from benchmarks import benchmark_memory
benchmark_memory.DOCUMENTS = 64
case = benchmark_memory.Case(1, 128, 1, 128, ranks=2, changes={"parallel": {"tensor_model_parallel_size": 2}})
benchmark_memory.compare({"toy": case}, output=Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_benchmark_finds_the_planned_activations_on_tensor_parallel_ranks(tmp_path):
    output = tmp_path / "figures.json"
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(output)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    (case,) = json.loads(output.read_text())["cases"]
    # The mask of the ids that the other rank has: one byte per token, and the ids without them.
    assert abs(case["kept MiB"] - case["planned kept"]) * 2**20 <= 2 * 9 * 128
    # A process cannot peak below what it trains with: the vocabulary's two tables, half of each, 16 bytes a weight.
    assert case["peak MiB"] * 2**20 > 30_522 * 128 * 16
    assert "plan / measured" in finished.stdout


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--output", "missing/figures.json"), 73, "error: --output missing/figures.json: "),
        (("--output", "."), 73, "error: --output .: "),
        pytest.param(
            ("--gpu",), 2, "error: --gpu: ", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
        ),
    ],
)
def test_what_cannot_be_measured_or_written_is_reported_before_measuring(flags, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_command("benchmarks.benchmark_memory", *flags)
    assert ended.refused(code), ended.output
    assert ended.output.startswith(words)


def test_process_of_a_case_that_dies_ends_the_benchmark_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_memory, "DOCUMENTS", 64)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    case = benchmark_memory.Case(1, 128, 1, 128, ranks=2)
    with pytest.raises(ConfigError, match=r"1 x 128, 1 x 128: a process ended with exit code 1 .* --only"):
        benchmark_memory.start_ranks(case, tmp_path)
