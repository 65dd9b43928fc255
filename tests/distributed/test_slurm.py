"""The Slurm template, with stand-ins for srun and scontrol: the nodes of the step are processes on this machine."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import read_metrics
from tests_tiny import tiny_settings
from training_command import REPOSITORY, environment, flags_of

from megatron_neobert.config.schema import Settings

TEMPLATE = str(REPOSITORY / "examples" / "slurm" / "pretrain.sh")
TRAIN_ITERS = 300

# Like srun: the environment of a step, SIGUSR1 to every process of every task, SIGTERM kills, the highest exit code.
SRUN = """
import os, psutil, signal, subprocess, sys

command = sys.argv[1:]
while command[0].startswith("--"):
    print("srun", command.pop(0), file=sys.stderr)
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
step = {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_STEP_NUM_TASKS": str(nodes)}
tasks = [psutil.Popen(command, env={**os.environ, **step, "SLURM_NODEID": str(node)}) for node in range(nodes)]

def signal_all(number, frame):
    for task in tasks:
        for process in [*task.children(recursive=True), task]:
            process.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)

signal.signal(signal.SIGUSR1, signal_all)
signal.signal(signal.SIGTERM, signal_all)
codes = [task.wait() for task in tasks]
sys.exit(max(128 - code if code < 0 else code for code in codes))
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '%s\\n' localhost node-2; else echo "$*" >>"${0%/*}/requeued"; fi
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with the two commands."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "srun.py").write_text(SRUN)
    # Through a shell: the path of this Python may have a space, which a first line of "#!" cannot express.
    srun = f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / "srun.py"))} "$@"\n'
    for name, source in (("srun", srun), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(source)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "bin"


def submit(cluster: Path, settings: Settings, *, nodes: int) -> subprocess.Popen[str]:
    job = {"SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": nodes}
    job |= {"SLURM_SUBMIT_DIR": REPOSITORY, "SLURM_CPUS_PER_TASK": 1, "PATH": f"{cluster}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", TEMPLATE, *flags_of(settings)],
        env=environment(1, **job),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_job_that_is_told_to_stop_saves_is_queued_again_and_goes_on(tiny_corpus, tmp_path, cluster):
    settings = tiny_settings(tiny_corpus, save=tmp_path / "run")
    settings = settings.with_section("checkpoint", load=settings.checkpoint.save)
    settings = settings.with_section("training", train_iters=TRAIN_ITERS, eval_interval=TRAIN_ITERS)
    with submit(cluster, settings, nodes=2) as job:
        assert job.stdout is not None
        said = []
        for line in job.stdout:
            said.append(line)
            if line.startswith("iteration 1/"):
                job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 75, "".join(said)
    assert any("on 2 x " in line for line in said)
    options = {line.split()[1] for line in said if line.startswith("srun ")}
    assert {"--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=720", "--cpus-per-task=1"} == options
    assert (cluster / "requeued").read_text() == "requeue 7\n"
    stopped_at = max(read_metrics(settings.checkpoint.save))
    assert stopped_at < TRAIN_ITERS

    (cluster / "requeued").unlink()
    finish = settings.with_section("training", train_iters=stopped_at + 2)
    with submit(cluster, finish, nodes=2) as job:
        output, _ = job.communicate(timeout=600)
    assert job.returncode == 0, output
    assert f"iter_{stopped_at:07d} on 2 x " in output
    assert max(read_metrics(settings.checkpoint.save)) == stopped_at + 2
    assert not (cluster / "requeued").exists(), "a finished job is not requeued"


@pytest.mark.slow
def test_job_stopped_by_a_file_is_not_queued_again(tiny_corpus, tmp_path, cluster):
    save = tmp_path / "run"
    settings = tiny_settings(tiny_corpus, save=save).with_section("checkpoint", load=str(save))
    settings = settings.with_section("training", train_iters=100_000, eval_iters=0)
    with submit(cluster, settings, nodes=1) as job:
        assert job.stdout is not None
        said = []
        for line in job.stdout:
            said.append(line)
            if line.startswith("iteration 1/"):
                (save / "STOP").touch()
        assert job.wait(60) == 75, "".join(said)
    assert f"{save}/STOP exists: the job is not requeued\n" in said
    assert not (cluster / "requeued").exists()
    with submit(cluster, settings, nodes=1) as job:
        output, _ = job.communicate(timeout=600)
    assert job.returncode == 2, output
    assert f"error: {save}/STOP exists, so no run starts" in output
