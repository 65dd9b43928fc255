"""The acceptance of a GPU, on a CPU with a tiny model: its report is true, and what must fail fails.

What a GPU alone can show, tests/gpu and the figures of a benchmark on it, is replaced where its judgement is tested.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import ENVIRONMENT, command_line
from processes import Ended, run_command

from megatron_neobert.config.cli import parse_command_line
from tools.acceptance import phases
from tools.acceptance.phases import Failed, Phase

QUICK = ("environment", "resume")
WITHOUT_GPU = ("environment", "parity", "speed", "resume", "profile")


def accept(output: Path, *names: str) -> Ended:
    return run_command("tools.accept_gpu", "--output", output, "--device", "cpu", "--phases", *names)


def results_of(output: Path) -> dict[str, dict]:
    return json.loads((output / "report.json").read_text())["phases"]


def start_and_interrupt(output: Path) -> int:
    """Ends the command as a machine that is taken away would, when it has finished its first phase; the exit code."""
    command = command_line("tools/accept_gpu.py", "--output", output, "--device", "cpu", "--phases", *QUICK)
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (output / "logs" / "resume_corpus.txt").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    return process.wait()


def processes_about(folder: Path) -> list[str]:
    """Command lines that name the folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended meanwhile
            continue
    return [line for line in found if str(folder) in line]


@pytest.mark.slow
def test_an_interrupted_acceptance_keeps_what_is_finished_and_ends_with_a_true_report(tmp_path):
    """Interrupted in its second phase; the figures of that are held against the records of its runs."""
    assert start_and_interrupt(tmp_path) == 130
    assert processes_about(tmp_path) == []
    assert [file.name for file in (tmp_path / "phases").iterdir()] == ["environment.json"]
    ended = accept(tmp_path, *QUICK)
    assert ended.code == 0, ended.output
    assert "environment: passed before, kept" in ended.output and "resume: passed, " in ended.output
    results = results_of(tmp_path)
    whole, resumed = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "resumed")
    )
    losses = {line["iteration"]: line["loss"] for line in whole}
    assert [losses[line["iteration"]] for line in resumed] == [line["loss"] for line in resumed]
    assert [line["iteration"] for line in resumed] == list(range(11, 21))
    expected = {"iterations": 10, "bit for bit": 10, "largest gap": 0.0}
    assert results["resume"]["tables"] == {"losses after resuming": [expected]}
    page = (tmp_path / "report.md").read_text()
    assert "| 10 | 10 | 0 |" in page and results["resume"]["date"] in page
    assert "shows nothing about a GPU" in page.splitlines()[0]
    assert "shows nothing about a GPU" in ended.output.splitlines()[-1]
    assert results["resume"]["machine"]["GPU"] == "none"
    assert list(tmp_path.glob("runs/*/iter_*")) == [], "checkpoints of a phase that has ended only take room"


def train_one_otherwise(monkeypatch, run: str, lr: float) -> None:
    """The fault: the run of this name has another learning rate, which shows from its second iteration on."""
    train = Phase.train

    def with_another_rate(phase: Phase, name: str, *arguments: object, **options: object):
        return train(phase, name, *arguments, *(("--lr", lr) if name == run else ()), **options)

    monkeypatch.setattr(Phase, "train", with_another_rate)


def test_a_resumed_run_whose_losses_differ_fails(tmp_path, monkeypatch):
    train_one_otherwise(monkeypatch, "resumed", 6e-3)
    phase = Phase("resume", tmp_path, "cpu")
    with pytest.raises(Failed, match=r"losses after resuming differ by \S+, more than 0"):
        phases.check_resume(phase)
    assert phase.tables["losses after resuming"][0]["bit for bit"] == 1


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs the command here, with other phases, as on a machine of this GPU."""
    from tools import accept_gpu

    def start_here(replaced: dict, *names: str, gpu: str = "none") -> int:
        for name, function in replaced.items():
            monkeypatch.setitem(phases.PHASES, name, function)
        device = "cpu" if gpu == "none" else "cuda"
        monkeypatch.setattr(accept_gpu, "describe_machine", lambda device: {"device": device, "GPU": gpu})
        words = ["accept_gpu.py", "--output", str(tmp_path), "--device", device, "--phases", *names]
        monkeypatch.setattr(sys, "argv", words)
        return accept_gpu.main()

    handler = signal.getsignal(signal.SIGTERM)
    yield start_here
    signal.signal(signal.SIGTERM, handler)


def fails(phase: Phase) -> None:
    with phase.case("the first case"):
        raise Failed("7 is not 8")
    phase.tables["figures"] = [{"value": 8}]


def lacks_a_figure(phase: Phase) -> None:
    raise KeyError("tokens/s")


def test_a_failed_phase_stops_no_other_and_is_run_again(start, tmp_path, capsys):
    ran = []
    replaced = {"environment": fails, "speed": ran.append, "resume": lacks_a_figure}
    assert start(replaced, "environment", "kernels", "speed", "resume") == 1
    last = "NOT accepted; failed: environment, resume; not run: kernels"
    assert capsys.readouterr().out.splitlines()[-1] == last
    results, page = results_of(tmp_path), (tmp_path / "report.md").read_text()
    problems = {"environment": "the first case: 7 is not 8", "resume": "KeyError: 'tokens/s'"}
    problems["kernels"] = "needs a CUDA device, and torch finds none"
    for name, problem in problems.items():
        assert results[name]["problems"] == [problem] and f"**{problem}**" in page
    assert results["environment"]["tables"] == {"figures": [{"value": 8}]} and last in page.splitlines()[0]
    assert start({"environment": ran.append, "resume": ran.append}, "environment", "speed", "resume") == 0
    assert [phase.name for phase in ran] == ["speed", "environment", "resume"], "speed has passed before, and is kept"


def test_a_gpu_is_accepted_when_every_phase_has_passed_on_it_and_not_on_another(start, tmp_path, capsys):
    ran = []
    replaced = dict.fromkeys(phases.PHASES, ran.append)
    assert start(replaced, "speed", gpu="NVIDIA H100") == 0
    assert "; not yet: environment, kernels" in capsys.readouterr().out.splitlines()[-1]
    assert start(replaced, *phases.PHASES, gpu="NVIDIA H200") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "accepted: NVIDIA H200"
    assert [phase.name for phase in ran] == ["speed", *phases.PHASES]
    assert (tmp_path / "report.md").read_text().startswith("# Acceptance: accepted: NVIDIA H200\n")


def test_a_command_that_takes_too_long_is_ended_with_the_processes_it_started(tmp_path):
    phase = Phase("speed", tmp_path, "cpu", ends=time.monotonic())
    sleep = f"[sys.executable, '-c', 'import time; time.sleep(99)', {str(tmp_path)!r}]"
    with pytest.raises(Failed, match=r"not finished when the phase's 600 s were over; see .*speed_slow_case\.txt"):
        phase.run("slow case", "-c", f"import subprocess, sys; subprocess.run({sleep})")
    time.sleep(0.2)
    assert processes_about(tmp_path) == []


@pytest.mark.parametrize("flags", [*phases.KERNELS.values(), *phases.RUNS.values()], ids=" ".join)
def test_what_is_run_on_a_gpu_are_settings_that_a_run_takes(flags):
    """At full size; whether the machine has the kernels is another question."""
    sizes = phases.SIZES["cuda"]
    data = ("--data-path", "corpus", "--tokenizer-model", "vocab.txt", "--seq-length", sizes.seq_length)
    batch = ("--micro-batch-size", sizes.rows, "--global-batch-size", sizes.rows, "--bf16")
    words = [str(word) for word in (*sizes.model, *data, *batch, *flags)]
    assert parse_command_line(words, world_size=1).settings.training.bf16


@pytest.mark.parametrize(
    ("waits", "problems"),
    [
        ({"step.py:95": 1}, []),
        ({"step.py:95": 1, "loss.py:7": 2}, ["local layers: the host waits 3 times in a step, and once is enough: "]),
        ({}, ["local layers: the host waits 0 times in a step, and once is enough: "]),
    ],
)
def test_a_step_that_does_not_wait_once_fails(waits, problems, tmp_path, monkeypatch):
    figures = {"waits": waits, "profile": [{"operation": "aten::mm", "calls": 1}]}
    monkeypatch.setattr(Phase, "benchmark", lambda *_, **__: figures)
    phase = Phase("profile", tmp_path, "cpu")
    phases.profile_step(phase)
    assert [problem.partition("{")[0] for problem in phase.problems] == problems


def test_fast_kernels_that_compute_something_else_fail(tmp_path, monkeypatch):
    row = {"row": 1024, "tokens/s": 1.0, "TFLOP/s": 1.0, "% MFU": None, "peak GiB": 1.0}

    def figures(phase: Phase, name: str, *flags: str, lengths: object) -> dict:
        loss = 9.0 * (1.02 if name == "Transformer Engine, cuDNN" else 1.0)
        return {"attention": None, "table": [row], "steps": [{"loss": loss}]}

    monkeypatch.setattr(Phase, "benchmark", figures)
    phase = Phase("speed", tmp_path, "cuda")
    phases.measure_speed(phase)
    assert phase.problems == [
        "Transformer Engine, cuDNN: its loss differs from that of the first kernels by 0.02, more than 0.01"
    ]
    measured = {row["kernels"] for row in phase.tables["steps"]}
    assert measured == set(phases.KERNELS) - {"local layers, flash-attn"}  # a package that is not installed here


@pytest.mark.slow
def test_a_run_in_fp8_is_held_against_bf16(tmp_path, monkeypatch):
    """Another learning rate for FP8: the curves are apart by more than a recipe's rounding."""
    runs = {"bf16": (), "bf16 again": (), "tensorwise": ("--lr", 6e-2)}
    monkeypatch.setattr(phases, "RUNS", runs)
    phase = Phase("fp8", tmp_path, "cpu")
    phases.compare_fp8(phase)
    (problem,) = phase.problems
    assert problem.startswith("tensorwise: its losses differ from those of bf16 by ")
    exact, again, fp8 = phase.tables["runs"]
    assert (again["largest gap"], again["last loss"]) == (0.0, exact["last loss"])
    assert fp8["largest gap"] > phases.FP8_LOSS and fp8["tokens/s"] > 0


@pytest.mark.slow
def test_all_phases_that_a_cpu_can_run_pass_and_fill_the_report(tmp_path):
    ended = accept(tmp_path, *WITHOUT_GPU)
    assert ended.code == 0, ended.output
    results = results_of(tmp_path)
    assert list(results) == list(WITHOUT_GPU)
    assert [row["row"] for row in results["speed"]["tables"]["steps"]] == [64, 128]
    assert {row["kernels"] for row in results["parity"]["tables"]["a step"]} >= {"local layers, float32"}
    assert results["profile"]["tables"]["local layers"][0]["ms"] > 0
    assert (tmp_path / "report.md").read_text().count("\n## ") == len(WITHOUT_GPU)
