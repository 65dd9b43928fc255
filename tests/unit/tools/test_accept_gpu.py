"""The acceptance of a GPU, run on a CPU with a tiny model: the report is correct, and a fault makes a phase fail.

Parts that need a GPU (tests/gpu, figures of the benchmark) are replaced where a test is about the judgement of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import ENVIRONMENT, command_line
from processes import run_command

from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.errors import OutputError
from tools.acceptance import phases
from tools.acceptance.phase import SIZES, Failed, Phase

WITHOUT_GPU = ("environment", "first-step", "resume", "speed", "parity", "profile", "evaluate")


def results_of(output: Path) -> dict[str, dict]:
    files = {name: output / "phases" / f"{name}.json" for name in phases.PHASES}
    return {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}


def start_and_interrupt(output: Path) -> int:
    """Start the command, send SIGTERM when its first phase has finished, and return the exit code."""
    command = command_line(
        "tools/accept_gpu.py", "--output", output, "--device", "cpu", "--phases", "environment", "resume"
    )
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (output / "logs" / "resume_corpus.txt").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    return process.wait()


def processes_about(folder: Path) -> list[str]:
    """Return the command lines of running processes that name the folder."""
    command_lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [line for line in command_lines if str(folder) in line]


def test_interrupt_while_a_command_starts_ends_the_command(tmp_path, monkeypatch):
    started, start = [], subprocess.Popen

    def start_and_raise(*arguments, **options):
        started.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_and_raise)
    with pytest.raises(KeyboardInterrupt):
        Phase("resume", tmp_path, "cpu").run("sleep", "-c", "import time; time.sleep(60)")
    assert started[0].poll() == -signal.SIGKILL


def test_resumed_run_whose_losses_differ_fails(tmp_path, monkeypatch):
    """The resumed run has another learning rate, which shows from its second iteration on."""
    train = Phase.train

    def train_with_another_rate(phase: Phase, name: str, *arguments: object, **options: object):
        return train(phase, name, *arguments, *(("--lr", 6e-3) if name == "resumed" else ()), **options)

    monkeypatch.setattr(Phase, "train", train_with_another_rate)
    phase = Phase("resume", tmp_path, "cpu")
    with pytest.raises(Failed, match=r"losses after resuming differ by \S+, more than 0"):
        phases.check_resume(phase)
    assert phase.tables["losses after resuming"][0]["bit for bit"] == 1


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that runs the command in this process, with replaced phases and a pretended GPU."""
    from tools import accept_gpu

    def start_here(replaced: dict, *names: str, gpu: str = "none") -> int:
        for name, function in replaced.items():
            monkeypatch.setitem(phases.PHASES, name, function)
        device = "cpu" if gpu == "none" else "cuda"
        monkeypatch.setattr(accept_gpu, "describe_machine", lambda device: {"device": device, "GPU": gpu})
        arguments = ["accept_gpu.py", "--output", str(tmp_path), "--device", device, "--phases", *names]
        monkeypatch.setattr(sys, "argv", arguments)
        return accept_gpu.main()

    return start_here


def fails(phase: Phase) -> None:
    with phase.case("the first case"):
        raise Failed("7 is not 8")
    phase.tables["figures"] = [{"value": 8}]


def lacks_a_figure(phase: Phase) -> None:
    raise KeyError("tokens/s")


def test_failed_phase_does_not_stop_the_others_and_runs_again(start, tmp_path, capsys):
    ran = []
    replaced = {"environment": fails, "speed": ran.append, "resume": lacks_a_figure}
    assert start(replaced, "environment", "kernels", "speed", "resume") == 1
    last = "not accepted; failed: environment, resume; not run: first-step, kernels, "
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)
    results, page = results_of(tmp_path), (tmp_path / "report.md").read_text()
    problems = {"environment": "the first case: 7 is not 8", "resume": "KeyError: 'tokens/s'"}
    problems["kernels"] = "needs a CUDA device, and torch finds none"
    for name, problem in problems.items():
        assert results[name]["problems"] == [problem] and f"| {problem} |" in page
    assert results["environment"]["tables"] == {"figures": [{"value": 8}]} and last in page.splitlines()[0]
    assert start({"environment": ran.append, "resume": ran.append}, "environment", "speed", "resume") == 0
    assert [phase.name for phase in ran] == ["speed", "environment", "resume"], "speed has passed before"


@pytest.mark.parametrize("content", [b"", b"[" * 9999, b"{}", b'{"status": 5}', b"\xff", None])
def test_phase_with_a_damaged_result_runs_again(start, tmp_path, content):
    ran = []
    assert start({"speed": ran.append}, "speed") == 0
    path = tmp_path / "phases" / "speed.json"
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    assert start({"speed": ran.append}, "speed") == 0
    assert len(ran) == 2 and results_of(tmp_path)["speed"]["status"] == "passed"


def test_folder_of_others_is_not_used(start, tmp_path):
    (tmp_path / "corpus").mkdir()
    with pytest.raises(OutputError, match="a folder that this project did not create"):
        start({"speed": fails}, "speed")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_gpu_is_accepted_when_every_phase_has_passed_on_this_gpu(start, tmp_path, capsys):
    ran = []
    replaced = dict.fromkeys(phases.PHASES, ran.append)
    assert start(replaced, "speed", gpu="NVIDIA H100") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("; passed: speed")
    assert start(replaced, *phases.PHASES, gpu="NVIDIA H200") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "accepted: NVIDIA H200"
    assert [phase.name for phase in ran] == ["speed", *phases.PHASES]
    assert (tmp_path / "report.md").read_text().startswith("# Acceptance: accepted: NVIDIA H200\n")


def test_command_that_takes_too_long_is_killed_with_its_child_processes(tmp_path):
    phase = Phase("speed", tmp_path, "cpu", ends=time.monotonic())
    sleep = f"[sys.executable, '-c', 'import time; time.sleep(99)', {str(tmp_path)!r}]"
    with pytest.raises(Failed, match=r"not finished within the 600 s of the phase; see .*speed_slow_case\.txt"):
        phase.run("slow case", "-c", f"import subprocess, sys; subprocess.run({sleep})")
    time.sleep(0.2)
    assert processes_about(tmp_path) == []


@pytest.mark.parametrize("flags", [*phases.KERNELS.values(), *phases.RUNS.values()], ids=" ".join)
def test_settings_of_the_gpu_phases_are_valid_at_full_size(flags):
    sizes = SIZES["cuda"]
    data = ("--data-path", "corpus", "--tokenizer-model", "vocab.txt", "--seq-length", sizes.seq_length)
    batch = ("--micro-batch-size", sizes.batch, "--global-batch-size", sizes.batch, "--bf16")
    arguments = [str(word) for word in (*sizes.model, *data, *batch, *flags)]
    assert parse_command_line(arguments, world_size=1).settings.training.bf16


@pytest.mark.parametrize(("waits", "count"), [({"step.py:95": 1, "loss.py:7": 2}, 3), ({}, 0)])
def test_step_in_which_the_host_does_not_wait_exactly_once_fails(waits, count, tmp_path, monkeypatch):
    figures = {"waits": waits, "profile": [{"operation": "aten::mm", "calls": 1, "ms": 1.0}]}
    monkeypatch.setattr(Phase, "benchmark", lambda *_, **__: figures)
    phase = Phase("profile", tmp_path, "cpu")
    phases.profile_step(phase)
    (problem,) = phase.problems
    assert problem.startswith(f"local layers: the host waits {count} times per step instead of once: ")


def test_kernel_with_another_loss_fails(tmp_path, monkeypatch):
    row = {"row": 1024, "tokens/s": 1.0, "TFLOP/s": 1.0, "% MFU": None, "peak GiB": 1.0}

    def figures(phase: Phase, name: str, *flags: str, lengths: object) -> dict:
        loss = 9.0 * (1.02 if name == "Transformer Engine, cuDNN" else 1.0)
        return {"attention": None, "machine": {"kernels": name}, "table": [row], "steps": [{"loss": loss}]}

    monkeypatch.setattr(Phase, "benchmark", figures)
    phase = Phase("speed", tmp_path, "cuda")
    phases.measure_speed(phase)
    assert phase.problems == [
        "Transformer Engine, cuDNN: loss differs from that of the first kernels by 0.02, more than 0.001"
    ]
    measured = {row["kernels"] for row in phase.tables["steps"]}
    assert measured == set(phases.KERNELS) - {"Transformer Engine, FlashAttention"}  # not installed for the tests


@pytest.mark.parametrize("last", [[{"loss": 6.0, "grad_norm": float("inf")}], []], ids=["infinite", "skipped"])
def test_first_step_that_is_not_finite_fails(last, tmp_path, monkeypatch):
    lines = [{"loss": 9.0, "grad_norm": 2.0}, {"loss": 8.0, "grad_norm": 2.0}, *last]
    curve = {number: {"iteration": number, **line} for number, line in enumerate(lines, 1)}
    monkeypatch.setattr(Phase, "train", lambda *_: curve)
    monkeypatch.setattr(Phase, "run", lambda *_: "")
    phase = Phase("first-step", tmp_path, "cuda")
    phases.check_first_step(phase)
    assert len(phase.problems) == 2, "local layers and Transformer Engine"


@pytest.mark.slow
def test_fp8_run_whose_losses_differ_from_bf16_fails(tmp_path, monkeypatch):
    """The FP8 run has another learning rate, so that its losses differ by more than the rounding of FP8."""
    runs = {"bf16": (), "bf16 again": (), "tensorwise": ("--lr", 6e-2)}
    monkeypatch.setattr(phases, "RUNS", runs)
    phase = Phase("fp8", tmp_path, "cpu")
    phases.compare_fp8(phase)
    (problem,) = phase.problems
    assert problem.startswith("tensorwise: losses differ from those in bf16 by ")
    bf16, again, fp8 = phase.tables["runs"]
    assert (again["largest gap"], again["last loss"]) == (0.0, bf16["last loss"])
    assert fp8["largest gap"] > phases.FP8_LOSS and fp8["tokens/s"] > 0


def test_score_that_differs_from_that_on_the_cpu_is_a_problem(tmp_path, monkeypatch):
    scores = {"here": 0.70, "cpu": 0.74}  # 100 rows, of which four have another class
    monkeypatch.setattr(phases, "evaluate", lambda *arguments: {"glue rte": scores[arguments[-1]]})
    monkeypatch.setattr(phases, "write_data", lambda folder, texts: folder)
    for method in ("run", "train"):
        monkeypatch.setattr(Phase, method, lambda phase, *arguments, **options: "")
    monkeypatch.setattr(Phase, "prepare_corpus", lambda phase: (tmp_path / "corpus", tmp_path))
    phase = Phase("evaluate", tmp_path, "cpu")
    phases.check_evaluations(phase)
    assert phase.problems == ["glue rte: the score differs from that on the CPU by 0.04, more than 0.03"]
    scores["here"] = 0.73
    phase = Phase("evaluate", tmp_path, "cpu")
    phases.check_evaluations(phase)
    assert phase.problems == [] and len(phase.tables["scores"]) == 1


@pytest.mark.slow
def test_phases_that_a_cpu_can_run_pass_after_an_interruption_and_are_in_the_report(tmp_path):
    assert start_and_interrupt(tmp_path) == 130
    assert processes_about(tmp_path) == []
    assert [file.name for file in (tmp_path / "phases").iterdir()] == ["environment.json"]
    ended = run_command("tools.accept_gpu", "--output", tmp_path, "--device", "cpu", "--phases", *WITHOUT_GPU)
    assert ended.code == 0, ended.output
    assert "environment: passed before, kept" in ended.output and "resume: passed, " in ended.output
    results = results_of(tmp_path)
    assert list(results) == list(WITHOUT_GPU)
    expected = {"iterations": 10, "bit for bit": 10, "largest gap": 0.0}
    assert results["resume"]["tables"] == {"losses after resuming": [expected]}
    assert [row["row"] for row in results["speed"]["tables"]["steps"]] == [64, 128]
    assert {row["kernels"] for row in results["parity"]["tables"]["a step"]} >= {"local layers, float32"}
    assert results["profile"]["tables"]["local layers"][0]["ms"] > 0
    page = (tmp_path / "report.md").read_text()
    assert "| 10 | 10 | 0 |" in page and results["resume"]["date"] in page
    assert "not run: kernels, fp8, move; passed: environment, " in page.splitlines()[0]
    assert list(tmp_path.glob("runs/*/iter_*")) == [], "checkpoints are deleted after a phase"
