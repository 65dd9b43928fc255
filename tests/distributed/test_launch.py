"""The two spellings of the launch, its exit codes and its signals, with real processes."""

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from processes import run_command
from ranks import read_metrics
from torch.distributed import TCPStore
from training_command import BASH, SCRIPT, TORCHRUN, environment

TORCHRUN_2 = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT]
TINY = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 --seq-length 64"
SHORT = "--micro-batch-size 2 --global-batch-size 4 --lr-warmup-iters 1 --eval-iters 0 --log-interval 1 --num-workers 0"


def flags(corpus, save: Path | None = None, **changes: object) -> list[str]:
    words = ["--data-path", corpus.prefix, "--tokenizer-model", corpus.tokenizer, *TINY.split(), *SHORT.split()]
    words += ["--save", str(save), "--load", str(save)] if save else []
    for name, value in changes.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def run(command: list[str], *, ranks: int = 1, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(ranks), capture_output=True, text=True, check=False, timeout=600, **options
    )


def test_script_runs_its_own_checkout_whatever_is_installed(tmp_path):
    other = tmp_path / "installed" / "megatron_neobert" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("raise SystemExit('the other one')\n")
    started = {"env": {**environment(1), "PYTHONPATH": str(other.parents[1])}, "cwd": tmp_path}
    command = [sys.executable, "-m", "megatron_neobert.launch", SCRIPT, "--help"]
    for words, code in ((BASH, 0), ([sys.executable, SCRIPT], 0), (command[:-1], 1)):  # the last one is the control
        ended = subprocess.run([*words, "--help"], capture_output=True, text=True, check=False, timeout=600, **started)
        assert ended.returncode == code, ended.stderr


def test_script_without_an_environment_is_one_sentence_and_69(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named yaml' >&2; exit 1\n")
    python.chmod(0o755)
    ended = subprocess.run(
        [*BASH, "--help"], env={**environment(1), "PYTHON": str(python)}, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, len(ended.stderr.splitlines())) == (69, 1)
    assert "No module named yaml); make an environment with tools/prepare_environment.sh" in ended.stderr


@pytest.fixture(scope="module")
def stopped(tiny_corpus, tmp_path_factory) -> SimpleNamespace:
    """A run of two ranks that bash has started and SIGTERM has stopped, and what was seen of it meanwhile."""
    found = SimpleNamespace(temporary=tmp_path_factory.mktemp("tmp"), save=tmp_path_factory.mktemp("run") / "a space")

    command = [*BASH, *flags(tiny_corpus, found.save, train_iters=100_000, num_workers=1)]
    variables = environment(2, TMPDIR=found.temporary)
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("iteration 3/"))
        launcher = psutil.Process(process.pid)
        ranks = launcher.children()
        found.listeners = {one.pid: listening(one) for one in (launcher, *ranks)}
        found.workers = {worker.pid: listening(worker) for rank in ranks for worker in rank.children()}
        host, port = found.listeners[launcher.pid][0]
        found.keys = TCPStore(host, port, is_master=False).list_keys()
        process.send_signal(signal.SIGTERM)
        found.output = process.stdout.read()
        assert process.wait(timeout=600) == 75
    return found


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    return [tuple(one.laddr) for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]


def test_nothing_that_one_node_starts_listens_beyond_loopback_and_loader_workers_listen_nowhere(stopped):
    assert len(stopped.listeners) == 3 and all(stopped.listeners.values())  # the store, and gloo's sockets in each rank
    assert {host for found in stopped.listeners.values() for host, _ in found} == {"127.0.0.1"}
    assert len(stopped.workers) == 2 and not any(stopped.workers.values())
    # torchrun unpickles what it finds under its dynamic rendezvous, wherever that came from; a static one has none.
    assert stopped.keys and not any("torch.rendezvous" in key for key in stopped.keys)


def test_a_signal_to_the_launcher_saves_ends_with_75_and_leaves_nothing_elsewhere(stopped):
    assert "a signal asked for it" in stopped.output
    assert list(stopped.temporary.iterdir()) == []
    last = max(read_metrics(stopped.save))
    assert (stopped.save / f"iter_{last:07d}" / "MANIFEST.json").is_file()


def test_torchrun_resumes_what_bash_has_started(stopped, tiny_corpus):
    last = max(read_metrics(stopped.save))
    resumed = run([*TORCHRUN_2, *flags(tiny_corpus, stopped.save, train_iters=last + 1)], ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert f"from {stopped.save}/iter_{last:07d} on 2 x cpu" in resumed.stdout
    assert max(read_metrics(stopped.save)) == last + 1


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"data_path": "nowhere"}, 66, "no corpus nowhere"),
        ({"tokenizer_model": "nowhere"}, 66, "nowhere"),
        ({"hidden_size": 33}, 2, "--hidden-size 33 is not a multiple of --num-attention-heads 2"),
        ({"global_batch_size": 3}, 2, "--global-batch-size 3 is not a multiple of --micro-batch-size 2"),
        ({"load": "nowhere"}, 66, "--load nowhere holds no checkpoint"),
        ({"split": "0,1"}, 65, "none"),
        ({"save": "/dev/null/run"}, 73, "--save /dev/null/run cannot be created"),
        ({"num_layers": 10**9, "save": "run"}, 74, " GiB free; at least one must fit. Make room there"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_start_ends_in_one_sentence_and_its_exit_code(tiny_corpus, tmp_path, monkeypatch, change, code, message):
    monkeypatch.chdir(tmp_path)
    ended = run_command("megatron_neobert.launch", SCRIPT, *flags(tiny_corpus, train_iters=2, **change))
    assert ended.refused(code), ended.output
    assert message in ended.output
    assert list(tmp_path.iterdir()) == [], "nothing is half written"
