"""The Slurm template, with stand-ins for srun and scontrol: the nodes of the step are processes on this machine."""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ranks import REPOSITORY, environment, flags_of, read_metrics, start
from tests_tiny import tiny_settings

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


def submit(cluster: Path, *flags: str, **variables: object) -> subprocess.Popen[str]:
    """Start the template as a job of two nodes."""
    job = {"SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": 2, "SLURM_CPUS_PER_TASK": 1}
    job |= {"SLURM_SUBMIT_DIR": REPOSITORY, "PATH": f"{cluster}:{os.environ['PATH']}"}
    return start(["bash", TEMPLATE, *flags], environment(1, **job, **variables))


def run_and_stop(cluster: Path, settings: Settings, stop: Callable[[subprocess.Popen[str]], None]) -> str:
    """Run a job, which ends with 75, call `stop` in its first iteration, and return its output."""
    with submit(cluster, *flags_of(settings)) as job:
        lines = list(itertools.takewhile(lambda line: not line.startswith("iteration "), job.stdout))
        stop(job)
        lines += job.stdout
    assert job.returncode == 75, "".join(lines)
    return "".join(lines)


def test_template_explains_itself_and_is_refused_outside_of_a_job(tmp_path):
    helped, refused = (
        subprocess.run(["bash", TEMPLATE, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        for words in (["--help"], [])
    )
    assert (helped.returncode, helped.stderr) == (0, "") and "sbatch --nodes=4" in helped.stdout
    options = re.findall(r"^#SBATCH --.*\n", Path(TEMPLATE).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert helped.stdout.endswith("\n\n" + "".join(f"  {option}" for option in options)) and len(options) > 10
    assert (refused.returncode, refused.stdout) == (2, "") and "not a Slurm job" in refused.stderr


@pytest.mark.slow
def test_job_told_to_stop_is_requeued_and_resumes_and_a_file_stop_ends_it(tiny_corpus, tmp_path, cluster):
    settings = tiny_settings(tiny_corpus, save=tmp_path / "run")
    settings = settings.with_section("checkpoint", load=settings.checkpoint.save)
    settings = settings.with_section("training", train_iters=TRAIN_ITERS, eval_interval=TRAIN_ITERS)
    output = run_and_stop(cluster, settings, lambda job: job.send_signal(signal.SIGUSR1))
    assert "on 2 CPU ranks" in output
    options = set(re.findall("^srun (.*)", output, flags=re.MULTILINE))
    assert options == {"--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=720", "--cpus-per-task=1"}
    assert (cluster / "requeued").read_text() == "requeue 7\n"
    stopped_at = max(read_metrics(settings.checkpoint.save))
    assert stopped_at < TRAIN_ITERS

    (cluster / "requeued").unlink()
    output = run_and_stop(cluster, settings, lambda _: (tmp_path / "run" / "STOP").touch())
    assert f"iter_{stopped_at:07d} on 2 CPU ranks" in output
    assert not (cluster / "requeued").exists()


# Ends like a run with the exit code EXIT_CODE, after it has saved the checkpoint CHECKPOINT, if there is one.
ENDED_STEP = """#!/usr/bin/env bash
if [[ -n ${CHECKPOINT-} ]]; then mkdir -p "$SAVE/$CHECKPOINT"; fi
exit "$EXIT_CODE"
"""


@pytest.fixture
def end_with(cluster, tmp_path):
    """A function that submits a job whose step ends at once, and returns whether the job was requeued, and its log."""
    save = tmp_path / "run"
    save.mkdir()
    (cluster / "srun").write_text(ENDED_STEP)

    def submit_and_end(code: int, *, checkpoint: str = "", flags: Sequence[str] = ("--save", str(save))):
        with submit(cluster, *flags, EXIT_CODE=code, CHECKPOINT=checkpoint, SAVE=save) as job:
            log = job.stdout.read()
        assert job.returncode == code, log
        was_requeued = (cluster / "requeued").exists()
        (cluster / "requeued").unlink(missing_ok=True)
        return was_requeued, log

    return submit_and_end


@pytest.mark.parametrize(
    ("code", "is_requeued"),
    [(0, False), (1, False), (2, False), (65, False), (70, False), (73, False), (130, False), (75, True), (138, True)]
    + [(code, True) for code in (69, 74, 134, 137, 139)],
)
def test_job_is_requeued_after_a_stop_or_a_crash_and_not_after_other_exit_codes(end_with, code, is_requeued):
    was_requeued, log = end_with(code)
    crash = ", crash 1 since the newest checkpoint (none)" if code in (69, 74, 134, 137, 139) else ""
    decision = f"pretrain: exit code {code}{crash}, {'' if is_requeued else 'not '}requeued\n"
    assert (was_requeued, log) == (is_requeued, decision)


def test_job_is_not_requeued_after_a_crash_without_save_or_with_a_file_stop(end_with, tmp_path):
    was_requeued, log = end_with(137, flags=())
    assert not was_requeued and log == "pretrain: exit code 137, a crash without --save, not requeued\n"
    (tmp_path / "run" / "STOP").touch()
    for code in (75, 137):
        was_requeued, log = end_with(code, flags=[f"--save={tmp_path / 'run'}"])
        assert not was_requeued and f"{tmp_path}/run/STOP exists, not requeued\n" in log


def test_five_crashes_without_a_new_checkpoint_end_the_job_and_a_new_checkpoint_starts_the_count_again(end_with):
    checkpoints = ["", "iter_0000010", "", "", "", ""]
    ends = [end_with(137, checkpoint=checkpoint) for checkpoint in checkpoints]
    assert [was_requeued for was_requeued, _ in ends] == [True, True, True, True, True, False]
    crash = "pretrain: exit code 137, crash 5 since the newest checkpoint (iter_0000010), not requeued; read the log"
    assert crash in ends[-1][1]
    assert end_with(137)[0], "a job that was submitted again counts from the start"
