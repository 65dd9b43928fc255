"""The commands of this project, started as a user does or imported, and a folder for preprocessing."""

import importlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from processes import Ended, run_command
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.errors import run_command as run_main

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
LETTERS += [f"##{letter}" for letter in LETTERS]


# Commands of `neobert` by the name of what they do.
NAMES = {
    "make_sample_corpus": "sample-corpus",
    "train_tokenizer": "train-tokenizer",
    "preprocess_data": "preprocess",
    "validate_data": "validate",
    "inspect_data": "inspect data",
    "adopt_corpus": "adopt",
    "find_duplicates": "find-duplicates",
    "plot_run": "plot",
    "inspect_batch": "inspect batch",
    "replay_batch": "replay",
    "average_checkpoints": "average",
    "convert": "convert",
    "verify": "verify",
    "write_model_card": "model-card",
    "export_onnx": "export-onnx",
    "evaluate_glue": "evaluate glue",
    "evaluate_mteb": "evaluate mteb",
    "evaluate_ner": "evaluate ner",
    "evaluate_pseudo_perplexity": "evaluate ppl",
    "benchmark_throughput": "evaluate throughput",
    "finetune_contrastive": "finetune",
    "fetch_glue": "fetch glue",
    "fetch_mteb": "fetch mteb",
    "fetch_contrastive": "fetch contrastive",
    "report": "report",
    "check_environment": "check environment",
    "check_parity": "check parity",
}


def file_of(tool: str) -> Path:
    folders = ("benchmarks", "checkpoint_conversion", "tools")
    return next(file for folder in folders if (file := REPOSITORY / folder / f"{tool}.py").exists())


def command_line(tool: str, *arguments: object) -> list[str]:
    command = ["-m", "megatron_neobert", *NAMES[tool].split()] if tool in NAMES else [str(file_of(tool))]
    return [sys.executable, *command, *map(str, arguments)]


def main_of(tool: str) -> tuple[str, list[str]]:
    """Return the module whose `main` starts a tool, and the words before its arguments."""
    if tool in NAMES:
        return "megatron_neobert.__main__", NAMES[tool].split()
    return f"{file_of(tool).parent.name}.{tool}", []


def run(tool: str, *arguments: object, **options: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; the options are those of subprocess.run."""
    options = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 600, **options}
    ended = subprocess.run(command_line(tool, *arguments), check=False, **options)
    return ended.returncode, ended.stdout, ended.stderr


def run_forked(tool: str, *arguments: object) -> Ended:
    """The same in a tenth of a second, with both streams in one."""
    module, words = main_of(tool)
    return run_command(module, *words, *arguments)


def call(tool: str, *arguments: object) -> tuple[int, str, str]:
    """The same in this process, which has imported most of it."""
    output, errors = io.StringIO(), io.StringIO()
    module, words = main_of(tool)
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ),  # what a command sets there is taken back
        _hub_as_before(),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", [f"{tool}.py", *words, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_main(importlib.import_module(module).main)
    return int(ended.value.code or 0), output.getvalue(), errors.getvalue()


@contextmanager
def _hub_as_before() -> Iterator[None]:
    """Undo `go_offline` in libraries that this process has imported, or later tests could not reach a loopback hub."""
    yield
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = False  # type: ignore[attr-defined]


def make_place(folder: Path, pieces: Sequence[str]) -> Path:
    """The folder with a vocab.txt of these pieces, and an empty folder of shards in it."""
    write_vocabulary(folder / "vocab.txt", pieces)
    (folder / "shards").mkdir()
    return folder


def arguments_of(place: Path, *more: object) -> tuple[object, ...]:
    """Of a preprocess_data that writes place/run_content_document."""
    given = {"--input": place / "shards", "--output-prefix": place / "run", "--tokenizer-model": place / "vocab.txt"}
    return (*(word for pair in given.items() if pair[0] not in more for word in pair), *more)


def corpus_bytes(place: Path, name: str = "run") -> list[bytes]:
    """Of the .bin, the .idx and the manifest."""
    return [(place / f"{name}_content_document.{end}").read_bytes() for end in ("bin", "idx", "json")]
