"""A conversion that fails, is stopped or is killed leaves no output, and does not change files of others."""

import glob
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from commands import call
from saved_model import assert_nothing_written, convert

from megatron_neobert.errors import OutputError, run_command
from megatron_neobert.runtime.atomic_files import build_folder


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit files of this process to `size` bytes, which has the effect of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 1000, 20_000], ids=["config", "tokenizer or head", "weights"])
@pytest.mark.parametrize("direction", ["megatron-to-hf", "hf-to-megatron"])
def test_full_disk_ends_with_74_and_leaves_no_output(saved, tmp_path, direction, size):
    source = saved.save
    if direction == "hf-to-megatron":
        source = tmp_path / "source"
        convert(saved, source, verified=False)
    with largest_file(size):
        code, _, error = call("convert", direction, "--load", source, "--output", tmp_path / "model")
    assert code == 74
    assert "model cannot be written (" in error and "File too large" in error
    assert error.count("\n") == 1
    assert_nothing_written(tmp_path)


def build_slowly(output: Path) -> None:
    def build() -> None:
        with build_folder(output) as folder:
            (folder / "half").write_text("half")
            time.sleep(600)

    run_command(build)


@contextmanager
def building(output: Path) -> Iterator[BaseProcess]:
    """Start a process that has written half of a folder and waits."""
    process = get_context("fork").Process(target=build_slowly, args=(output,))
    process.start()
    try:
        while not list(output.parent.glob(f"{glob.escape(output.name)}.unfinished.*/half")):
            assert process.is_alive()
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.join()


def test_sigterm_removes_the_unfinished_folder(tmp_path: Path):
    with building(tmp_path / "model") as process:
        process.terminate()
        process.join()
    assert process.exitcode == 130
    assert_nothing_written(tmp_path)


def test_error_of_an_input_is_not_an_error_of_the_output(tmp_path: Path):
    with pytest.raises(FileNotFoundError), build_folder(tmp_path / "model"):
        (tmp_path / "input").read_bytes()
    assert_nothing_written(tmp_path)


def test_output_that_another_program_created_meanwhile_is_kept(tmp_path: Path):
    with (
        pytest.raises(OutputError, match="model was created by another program meanwhile"),
        build_folder(tmp_path / "model"),
    ):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "notes.txt").write_text("theirs")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model", "model/notes.txt"]
