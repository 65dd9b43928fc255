"""Command: what can users of each version of transformers do with these exported folders?

    python tools/check_transformers.py MODEL_DIR [MODEL_DIR...]

Every version gets an environment of its own, with the torch that runs this command and accelerate, installed with pip
(minutes and some GB each; it goes afterwards unless --keep names a place). Every folder then goes through the checks of
tools/transformers_checks in it, on the CPU. Prints a matrix and the reasons. Exit code 0: nothing failed; 1: something
did.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import CommandParser, ConfigError, MissingInputError, OutputError, run_command

if TYPE_CHECKING:  # a missing package is reported by run_command
    from packaging.version import Version

VERSIONS = ("4.48.3", "4.57.3", "5.23.0")  # the first with the attention interface, the last of 4, and a new one
SECONDS_PER_FOLDER = 3600
TOOLS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Column:
    """What one folder did with one version of transformers."""

    folder: str
    transformers: str
    versions: dict[str, str | None]
    checks: dict[str, dict[str, Any]]  # as run_checks.py writes them

    @property
    def title(self) -> str:
        return f"{self.folder}, {self.transformers}"


def main() -> int:
    """Runs everything, prints it, and returns 0 or 1."""
    arguments = _parse()
    for folder in arguments.folders:
        if brings_code(folder) and not arguments.trust_remote_code:
            raise ConfigError(
                f"{folder} brings its own code (auto_map in its config.json), which runs only with --trust-remote-code."
            )
    columns: list[Column] = []
    with tempfile.TemporaryDirectory() as scratch:
        for version in arguments.transformers:
            python = prepare_environment(arguments.keep or Path(scratch), version)
            for folder in arguments.folders:
                print(f"{folder} with transformers {version} ...", file=sys.stderr, flush=True)
                columns.append(_check(python, folder, version))
    print(to_text(columns))
    if arguments.output is not None:
        _write_report(arguments.output, columns)
    return int(any(cell["outcome"] == "FAILED" for column in columns for cell in column.checks.values()))


def _parse() -> argparse.Namespace:
    from packaging.version import Version

    parser = CommandParser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="MODEL_DIR", help="folder that convert.py wrote")
    parser.add_argument(
        "--transformers",
        nargs="+",
        type=Version,
        default=[Version(version) for version in VERSIONS],
        metavar="X",
        help=f"versions (default: {' '.join(VERSIONS)})",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there as JSON as well")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the environments there, and use those there")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let code in the folders run; only for folders from people you trust",
    )
    return parser.parse_args()


def brings_code(folder: Path) -> bool:
    """Whether transformers would ask for trust_remote_code.

    Raises:
        MissingInputError: There is no model.
        ConfigError: config.json is damaged.
    """
    try:
        return "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingInputError(f"{folder} has no config.json; name a folder that convert.py wrote.") from None
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is not JSON ({error}); write the folder again.") from None


def prepare_environment(place: Path, version: "Version") -> Path:
    """The Python of an environment with this transformers: place/transformers-VERSION, made unless it is there.

    Raises:
        MissingInputError: pip cannot install it.
    """
    environment = (place / f"transformers-{version}").absolute()
    python = environment / "bin" / "python"
    if _holds(python, version):
        return python
    print(f"installing transformers {version} into {environment} ...", file=sys.stderr, flush=True)
    try:
        venv.create(environment, clear=True, with_pip=True)
    except OSError as error:
        raise OutputError(f"{environment}: cannot be created ({error.strerror}); choose another --keep.") from error
    torch = installed_version("torch").partition("+")[0]  # which build, for GPUs or not, is for pip's settings to say
    packages = [f"torch=={torch}", f"transformers=={version}", "accelerate"]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    ended = subprocess.run(pip, capture_output=True, text=True, check=False)
    if ended.returncode:
        reason = _last_line(ended.stderr)
        raise MissingInputError(f"{' '.join(packages)} cannot be installed into {environment} (pip: {reason}).")
    return python


def _holds(python: Path, version: "Version") -> bool:
    from packaging.version import Version

    if not python.exists():
        return False
    program = "import accelerate, importlib.metadata, torch; print(importlib.metadata.version('transformers'))"
    ended = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return ended.returncode == 0 and Version(ended.stdout.strip()) == version


def _check(python: Path, folder: Path, version: "Version") -> Column:
    """Runs the checks in a process of that environment; one that breaks down fails with its last words."""
    name = folder.resolve().name
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [str(python), "-m", "transformers_checks.run_checks", str(folder.absolute()), "--output", str(report)]
        if brings_code(folder):  # and the user trusts it, or we would not be here
            command.append("--trust-remote-code")
        # A cache of its own: transformers copies remote code there, under the folder's name.
        own = {"PYTHONPATH": str(TOOLS), "HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))
        }
        try:
            ended = subprocess.run(
                command,
                cwd=scratch,
                env=environment | own,
                capture_output=True,
                text=True,
                timeout=SECONDS_PER_FOLDER,
                check=False,
            )
            last_words = f"exit code {ended.returncode}: {_last_line(ended.stderr)}"
        except subprocess.TimeoutExpired:
            last_words = f"not done after {SECONDS_PER_FOLDER} seconds"
        if not report.exists():
            return Column(name, str(version), {}, {"start": {"outcome": "FAILED", "reason": last_words}})
        content = json.loads(report.read_text(encoding="utf-8"))
    return Column(name, str(version), content["versions"], content["checks"])


def to_text(columns: Sequence[Column]) -> str:
    """A table in Markdown, and below it why a cell is not ok."""
    names = list(dict.fromkeys(name for column in columns for name in column.checks))
    rows = [["", *(column.title for column in columns)]]
    rows += [[name, *(_cell(column.checks.get(name)) for column in columns)] for name in names]
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    why = [line for column in columns for line in _reasons(column, names)]
    return "\n".join(lines + [""] * bool(why) + why)


def _reasons(column: Column, names: Sequence[str]) -> list[str]:
    """One line for all cells that are not ok for the same reason."""
    reasons: dict[str, list[str]] = {}
    for name, cell in column.checks.items():
        if cell["outcome"] != "ok":
            reasons.setdefault(f"{cell['outcome']}: {cell['reason']}", []).append(name)
    return [f"{column.title}: {reason} ({_name(named, names)})" for reason, named in reasons.items()]


def _cell(check: dict[str, Any] | None) -> str:
    if check is None:  # the process broke down before it
        return ""
    return "-" if check["outcome"] == "not applicable" else check["outcome"]


def _name(named: Sequence[str], names: Sequence[str]) -> str:
    others = [name for name in names if name not in named]
    if not others:
        return "all"
    return "; ".join(named) if len(named) <= len(others) else f"all but: {'; '.join(others)}"


def _write_report(output: Path, columns: Sequence[Column]) -> None:
    content = [{"folder": column.folder, "versions": column.versions, "checks": column.checks} for column in columns]
    try:
        output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output {output}: cannot be written ({error.strerror}).") from error


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


if __name__ == "__main__":
    run_command(main)
