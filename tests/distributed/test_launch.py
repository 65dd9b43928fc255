"""The launcher with real processes: both ways to start it, exit codes and signals."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import failing_rank
import psutil
import pytest
from processes import run_command
from ranks import BASH, SCRIPT, TORCHRUN, environment, flags_of, read_metrics, start
from tests_tiny import tiny_settings
from torch.distributed import TCPStore

from megatron_neobert import launch

TORCHRUN_2 = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT]


def flags(corpus, save: Path | None = None, **changes: object) -> list[str]:
    settings = tiny_settings(corpus, save=save).with_section("checkpoint", load=str(save) if save else None)
    changed = (word for name, value in changes.items() for word in (f"--{name.replace('_', '-')}", str(value)))
    return [*flags_of(settings), *changed]


def test_script_runs_its_own_checkout_and_not_an_installed_package(tmp_path):
    installed = tmp_path / "installed" / "megatron_neobert" / "__init__.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("raise SystemExit('the installed package')\n")
    options = {"env": {**environment(1), "PYTHONPATH": str(installed.parents[1])}, "cwd": tmp_path}
    control = [sys.executable, "-m", "megatron_neobert.launch", SCRIPT]
    for command, code in ((BASH, 0), ([sys.executable, SCRIPT], 0), (control, 1)):
        ended = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False, **options)
        assert ended.returncode == code, ended.stderr


def test_script_without_a_python_environment_ends_with_69_and_one_sentence(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named yaml' >&2; exit 1\n")
    python.chmod(0o755)
    ended = subprocess.run(
        [*BASH, "--help"], env=environment(1, PYTHON=python), capture_output=True, text=True, check=False
    )
    assert (ended.returncode, len(ended.stderr.splitlines())) == (69, 1)
    assert "No module named yaml); run bash tools/prepare_environment.sh" in ended.stderr


@pytest.fixture(scope="module")
def stopped(tiny_corpus, tmp_path_factory) -> SimpleNamespace:
    """A run of two ranks, started by the bash script under nohup and stopped by SIGTERM, and its open ports."""
    run = SimpleNamespace(temporary=tmp_path_factory.mktemp("tmp"), save=tmp_path_factory.mktemp("run") / "a space")

    command = ["nohup", *BASH, *flags(tiny_corpus, run.save, train_iters=100_000, num_workers=1)]
    variables = environment(2, TMPDIR=run.temporary)
    with start(command, variables) as process:
        next(line for line in process.stdout if line.startswith("iteration 3/"))
        launcher = psutil.Process(process.pid)
        ranks = launcher.children()
        run.listeners = {process.pid: listening(process) for process in (launcher, *ranks)}
        run.workers = {worker.pid: listening(worker) for rank in ranks for worker in rank.children()}
        host, port = run.listeners[launcher.pid][0]
        run.keys = TCPStore(host, port, is_master=False).list_keys()
        process.send_signal(signal.SIGHUP)  # the terminal closes
        process.send_signal(signal.SIGTERM)
        run.output = process.stdout.read()
        assert process.wait(timeout=600) == 75
    return run


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    connections = process.net_connections("inet")
    return [tuple(connection.laddr) for connection in connections if connection.status == psutil.CONN_LISTEN]


def test_processes_of_a_single_node_listen_on_loopback_only_and_loader_workers_do_not_listen(stopped):
    assert len(stopped.listeners) == 3 and all(stopped.listeners.values())  # the store, and gloo in each rank
    assert {host for sockets in stopped.listeners.values() for host, _ in sockets} == {"127.0.0.1"}
    assert len(stopped.workers) == 2 and not any(stopped.workers.values())
    # torchrun unpickles the values of its dynamic rendezvous, which any client could write.
    assert stopped.keys and not any("torch.rendezvous" in key for key in stopped.keys)


def test_signal_to_the_launcher_saves_ends_with_75_and_leaves_no_temporary_files(stopped):
    assert "a stop signal was received" in stopped.output
    assert list(stopped.temporary.iterdir()) == []
    last = max(read_metrics(stopped.save))
    assert (stopped.save / f"iter_{last:07d}" / "MANIFEST.json").is_file()


def test_torchrun_resumes_a_run_of_the_bash_script(stopped, tiny_corpus):
    last = max(read_metrics(stopped.save))
    command = [*TORCHRUN_2, *flags(tiny_corpus, stopped.save, train_iters=last + 1)]
    resumed = subprocess.run(command, env=environment(2), capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert f"from {stopped.save}/iter_{last:07d} on 2 CPU ranks" in resumed.stdout
    assert max(read_metrics(stopped.save)) == last + 1


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"hidden_size": 33}, 2, "--hidden-size 33 is not a multiple of --num-attention-heads 4"),
        ({"split": "0,1"}, 65, "none"),
        ({"save": "/dev/null/run"}, 73, "--save /dev/null/run cannot be created"),
        ({"num_layers": 10**9, "save": "run"}, 74, " GiB free; at least one must fit. Make room there"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_start_ends_with_its_code_and_one_sentence(tiny_corpus, tmp_path, monkeypatch, change, code, message):
    monkeypatch.chdir(tmp_path)
    other_launcher = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}  # variables left over from it are ignored
    command = [SCRIPT, *flags(tiny_corpus, train_iters=2, **change)]
    ended = run_command("megatron_neobert.launch", *command, environment=other_launcher)
    assert ended.refused(code), ended.output
    assert message in ended.output and "on rank" not in ended.output
    assert list(tmp_path.iterdir()) == [], "no files are left"


@pytest.mark.parametrize(("cores", "batch", "ranks"), [(1, 8, 1), (2, 8, 2), (6, 8, 4), (6, 7, 1), (64, 2048, 8)])
def test_without_a_gpu_there_is_a_rank_per_core_as_far_as_the_batch_allows(monkeypatch, cores, batch, ranks):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    words = ["--data-path", "corpus", "--tokenizer-model", "tokenizer", "--global-batch-size", str(batch)]
    assert launch.choose_cpu_ranks(words, nodes=1) == ranks


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize(
    ("batch", "more", "variables", "first", "then"),
    [
        (2, "", {}, r"no GPU: 2 ranks on \d+ cores.*; NPROC_PER_NODE",
         "on 2 CPU ranks, .* in 1 micro-batch of 1 packed "),
        (1, "", {}, r"no GPU: 1 rank on \d+ cores, because the settings allow no more; NPROC_PER_NODE",
         "on 1 CPU rank, "),
        (2, "--dry-run", {}, r"no GPU: planned for 2 ranks on \d+ cores.*; --gpus N plans for N GPUs", ""),
        (2, "--dry-run", {"NNODES": "2"},
         r"no GPU: planned for 1 rank on \d+ cores of each of 2 nodes, because .*; --gpus N plans", ""),
        (2, "--dry-run --gpus 2", {}, "model ", ""),
        (2, "--dry-run", {"NPROC_PER_NODE": "2"}, "model ", ""),
    ],
)  # fmt: skip
def test_first_line_without_a_gpu_has_the_chosen_ranks_unless_they_were_given(
    tiny_corpus, batch, more, variables, first, then
):
    words = [*flags(tiny_corpus, train_iters=2, global_batch_size=batch, micro_batch_size=batch), *more.split()]
    outside = {name: value for name, value in environment(1).items() if name != "NPROC_PER_NODE"}
    with start([*BASH, *words], outside | variables) as process:
        lines = process.stdout.read().splitlines()
    assert process.returncode == 0 and re.match(first, lines[0]), lines
    assert any(re.search(then, line) for line in lines)


@pytest.mark.slow
def test_second_interrupt_aborts_launcher_and_ranks_with_130(tiny_corpus):
    words = [failing_rank.__file__, *flags_of(tiny_settings(tiny_corpus))]
    command = [sys.executable, "-m", "megatron_neobert.launch", *words]
    modules = os.pathsep.join(sys.path)
    with start(command, environment(2, FAULT="training:1:hang", PYTHONPATH=modules)) as process:
        assert any("the fault" in line for line in process.stdout)
        ranks = psutil.Process(process.pid).children()
        for rank in ranks:  # a terminal sends Ctrl-C to all processes of the command
            rank.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert any("Ctrl-C again stops at once" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        process.wait(600)
    assert "Ctrl-C again stops at once" not in output, "announced once"
    assert process.returncode == 130, output
    assert "rank 0: aborted\n" in output
    assert "rank 1: aborted\n" in output
    assert not any(rank.is_running() for rank in ranks)
