"""The two spellings of the launch, its exit codes and its signals, with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ranks import read_metrics
from torch.distributed import TCPStore
from training_command import BASH, REPOSITORY, SCRIPT, TORCHRUN, environment

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


@pytest.mark.slow
def test_one_rank_needs_no_launcher(tiny_corpus, tmp_path):
    finished = run([*BASH, *flags(tiny_corpus, tmp_path / "run", train_iters=2)])
    assert finished.returncode == 0, finished.stderr
    assert "on 1 x cpu" in finished.stdout


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_saved_iteration(tiny_corpus, tmp_path):
    command = [*TORCHRUN_2, *flags(tiny_corpus, tmp_path, train_iters=100_000)]
    with subprocess.Popen(
        command, env=environment(2), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("iteration 3/"))
        (rank_1,) = [pid for pid in children_of(process.pid) if environment_of(pid).get("RANK") == "1"]
        os.kill(rank_1, signal.SIGTERM)
        output = process.stdout.read()
        process.wait(timeout=600)
    stopped = next(line for line in output.splitlines() if line.startswith("stopped"))
    assert stopped.endswith("a signal asked for it")
    iteration = int(stopped.split()[3])
    assert (tmp_path / f"iter_{iteration:07d}" / "MANIFEST.json").is_file()
    assert max(read_metrics(tmp_path)) == iteration


def test_nothing_that_one_node_starts_listens_beyond_loopback_and_loader_workers_listen_nowhere(tiny_corpus):
    command = [*BASH, *flags(tiny_corpus, train_iters=100_000, num_workers=1)]
    with subprocess.Popen(
        command, env=environment(2), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("iteration 1/"))
        launcher = psutil.Process(process.pid)
        ranks = launcher.children()
        listeners = {one.pid: listening(one) for one in (launcher, *ranks)}
        workers = {worker.pid: listening(worker) for rank in ranks for worker in rank.children()}
        host, port = listeners[launcher.pid][0]
        keys = TCPStore(host, port, is_master=False).list_keys()
        process.kill()
        process.stdout.read()
    assert len(listeners) == 3 and all(listeners.values())  # the store, and gloo's sockets in each rank
    assert {host for found in listeners.values() for host, _ in found} == {"127.0.0.1"}
    assert len(workers) == 2 and not any(workers.values())
    # torchrun unpickles what it finds under its dynamic rendezvous, wherever that came from; a static one has none.
    assert keys and not any("torch.rendezvous" in key for key in keys)


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    return [tuple(one.laddr) for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]


def signal_in_iteration_3(command: list[str], number: int) -> str:
    """Output of a launcher of two ranks that gets a signal, and ends with 75."""
    with subprocess.Popen(
        command, env=environment(2), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("iteration 3/"))
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(timeout=600) == 75
    return output


def test_bash_starts_two_ranks_that_a_signal_stops_with_75_and_torchrun_resumes_them_and_nothing_is_left_elsewhere(
    tiny_corpus, tmp_path, monkeypatch
):
    temporary, save = tmp_path / "temporary", tmp_path / "run with a space"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    output = signal_in_iteration_3([*BASH, *flags(tiny_corpus, save, train_iters=100_000)], signal.SIGTERM)
    assert "a signal asked for it" in output
    assert list(temporary.iterdir()) == []
    last = max(read_metrics(save))
    checkpoint = save / f"iter_{last:07d}"
    assert (checkpoint / "MANIFEST.json").is_file()
    resumed = run([*TORCHRUN_2, *flags(tiny_corpus, save, train_iters=last + 1)], ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert f"from {checkpoint} on 2 x cpu" in resumed.stdout
    assert max(read_metrics(save)) == last + 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_other_signals_to_the_launcher_save_and_end_with_75_as_well(tiny_corpus, tmp_path, number):
    output = signal_in_iteration_3([*BASH, *flags(tiny_corpus, tmp_path, train_iters=100_000)], number)
    assert "a signal asked for it" in output
    assert (tmp_path / f"iter_{max(read_metrics(tmp_path)):07d}" / "MANIFEST.json").is_file()


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


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
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_start_ends_in_one_sentence_and_its_exit_code(tiny_corpus, tmp_path, change, code, message):
    finished = run([*BASH, *flags(tiny_corpus, train_iters=2, **change)], cwd=tmp_path)
    assert finished.returncode == code, finished.stderr
    assert message in finished.stderr
    assert finished.stderr.startswith("error: ")
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is half written"


def test_a_tokenizer_that_did_not_write_the_corpus_is_refused_on_every_rank(tiny_corpus, tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n", encoding="utf-8")
    finished = run([*BASH, *flags(tiny_corpus, train_iters=2, tokenizer_model=vocabulary)], ranks=2)
    assert finished.returncode == 65, finished.stderr
    assert "was written with tokenizer" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
def test_a_fresh_start_into_the_folder_of_another_run_is_refused(tiny_corpus, tmp_path):
    assert run([*BASH, *flags(tiny_corpus, tmp_path / "run", train_iters=1, lr_warmup_iters=0)]).returncode == 0
    again = run([*BASH, *flags(tiny_corpus, train_iters=1, lr_warmup_iters=0), "--save", str(tmp_path / "run")])
    assert again.returncode == 73
    assert "already holds checkpoints" in again.stderr


@pytest.mark.slow
def test_nothing_is_left_to_do_after_the_last_iteration(tiny_corpus, tmp_path):
    command = [*BASH, *flags(tiny_corpus, tmp_path / "run", train_iters=1, lr_warmup_iters=0)]
    assert run(command).returncode == 0
    started = time.monotonic()
    again = run(command)
    assert again.returncode == 0, f"{again.stderr} after {time.monotonic() - started:.0f} s"
    assert "nothing to do: iteration 1 of 1" in again.stdout


def test_package_called_apex_that_is_not_nvidias_is_refused_before_megatron_imports_it(tiny_corpus, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise AttributeError('another project')\n")
    (tmp_path / "apex-0.9.10.dist-info").mkdir()
    (tmp_path / "apex-0.9.10.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    here = environment(1, PYTHONPATH=f"{REPOSITORY}:{tmp_path}")
    finished = subprocess.run([*BASH, *flags(tiny_corpus)], env=here, capture_output=True, text=True, check=False)
    assert finished.returncode == 2, finished.stderr
    assert finished.stderr.startswith("error: The installed package apex 0.9.10 is not NVIDIA Apex")
    assert "Traceback" not in finished.stderr
