"""A disk that is full: the checkpoint is not there, all others are, and the run goes on exactly once there is room."""

import re
import subprocess
from pathlib import Path

import pytest
from distributed.training_command import BASH
from reliability.conftest import ITERATIONS, LAUNCH_FAULTY
from reliability.states import assert_same_state, names_in

from megatron_neobert.checkpoint.folder import verify_files

OFTEN = ("--save-interval", 10)
# What is broken, which rank, in which iteration; and how the checkpoint is written. The kernel refuses the writing. The
# second rank writes tensors with tensor parallelism only. Errors of rank 0 alone: distributed/test_saving.py, planted.
CASES = {
    "file_size_limit:0:255": (),
    "file_size_limit:1:255": ("--async-save", "--tensor-model-parallel-size", 2),
}


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_ends_all_with_74_leaves_the_old_checkpoints_and_loses_no_bit(
    start, copy_until, undisturbed
):
    save = copy_until(250)
    before = names_in(save)
    for fault, options in CASES.items():
        with start(save, *OFTEN, *options, command=LAUNCH_FAULTY, FAULTS=fault) as training:
            assert training.finish() == 74, training.output
        assert sorted(re.findall(r"rank (\d) ends with (\d+)", training.output)) == [("0", "74"), ("1", "74")]
        (error,) = [line for line in training.lines if line.startswith("error")]
        rank = fault.split(":")[1]
        assert "iteration 260 could not be saved: " in error and f"rank {rank}" in error and "File too large" in error
        assert f"The newest checkpoint is {save / 'iter_0000250'}" in error
        assert "Traceback" not in training.output
        assert {name for name in names_in(save) if not name.startswith(".tmp-")} == before
        verify_files(save / "iter_0000250")
    with start(save, *OFTEN) as training:
        assert training.finish() == 0, training.output
    last = f"iter_{ITERATIONS:07d}"
    assert_same_state(save / last, undisturbed / last)
    assert [name for name in names_in(save) if name.startswith(".")] == []


def in_small_file_system(folder: Path, size_kib: int) -> list[str]:
    """Words before a command that give it a file system of that size at `folder`, and list what is in it at the end."""
    mount = f'mount -t tmpfs -o size={size_kib}k small "{folder}"'
    script = f'{mount} || exit 99; "$@"; code=$?; ls -A "{folder}" | sed "s/^/left: /"; exit $code'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]


@pytest.mark.slow
def test_a_disk_without_room_for_a_checkpoint_is_noticed_before_it_is_written(start, undisturbed, tmp_path):
    probe = subprocess.run([*in_small_file_system(tmp_path, 100), "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"this kernel gives users no file system of their own: {probe.stderr.strip()}")
    used = sum(path.stat().st_size for path in (undisturbed / "iter_0000050").rglob("*"))
    size_kib = used * 13 // 10 // 1024
    with start(tmp_path, *OFTEN, command=[*in_small_file_system(tmp_path, size_kib), *BASH]) as training:
        assert training.finish() == 74, training.output
    (error,) = [line for line in training.lines if line.startswith("error")]
    assert "iteration 20 could not be saved: " in error
    assert "free, but a checkpoint takes" in error
    left = re.findall("left: (.*)", training.output)
    assert "iter_0000010" in left
    assert [name for name in left if name.startswith(".")] == []
