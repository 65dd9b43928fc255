"""Accept a GPU: check that it computes what the tests show on a CPU, and measure its speed.

    python tools/accept_gpu.py --output acceptance
    python tools/accept_gpu.py --output acceptance --phases parity speed
    python tools/accept_gpu.py --output rehearsal --device cpu      # tries the command with a tiny model, without a GPU

`tools/acceptance/phases.py` has ten phases, which run on one GPU for at most ten minutes each. A phase starts
commands of this project and compares their figures with limits. A phase that fails does not stop the others. A second
call with the same output folder keeps the phases that passed with the same GPU and versions. The folder contains
report.md, the results of each phase and the output of all commands.

Exit code 0: all requested phases passed. 1: a phase failed, or could not run on this machine.
"""

import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed package

from megatron_neobert import __version__
from megatron_neobert.cli import Parser
from megatron_neobert.errors import run_command, short_reason
from megatron_neobert.evaluation.pages import code, heading, table
from megatron_neobert.runtime.atomic_files import read_text, replace_file
from megatron_neobert.runtime.environment import installed_packages
from megatron_neobert.runtime.own_files import claim_folder
from megatron_neobert.text import parse_json
from tools.acceptance.phase import Failed, Phase
from tools.acceptance.phases import NEEDS_CUDA, PHASES

PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-4")
Status = Literal["passed", "failed", "not run"]
MACHINE = """import json, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"GPU": gpu, "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}))"""


@dataclass(kw_only=True)
class Result:
    """Result of a phase, which is the content of phases/NAME.json."""

    status: Status
    date: str
    seconds: int
    problems: list[str]
    tables: dict[str, list[dict[str, Any]]]
    commands: list[str]
    machine: dict[str, str]


def main() -> int:
    """Run the requested phases that have not passed on this machine yet, and update the report after each phase.

    Return 0 if all requested phases have passed, in this call or an earlier one, or else 1.
    """
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the report: new, or of an earlier call")
    add("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="phases to run (default all)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu runs a tiny model (default cuda)")
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    claim_folder(output)  # runs/ and corpus/ in it may be deleted
    (output / "phases").mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which ends the processes of a phase
    machine = describe_machine(arguments.device)
    requested = [name for name in PHASES if name in arguments.phases]
    for name in requested:
        results, kept = read_results(output, machine), " before, kept"
        if name not in results or results[name].status != "passed":
            run_phase(Phase(name, output, arguments.device), machine)
            results, kept = read_results(output, machine), ""
        write_report(output, results, machine)
        result = results[name]
        print(f"{name}: {result.status}{kept}, {result.seconds} s", *result.problems, sep="\n  ", flush=True)
    print(f"report: {output / 'report.md'}\n{verdict(results, machine)}")
    return 0 if all(results[name].status == "passed" for name in requested) else 1


def describe_machine(device: str) -> dict[str, str]:
    """Return facts that identify a machine: device, GPU (or "none"), versions, and torch's error if it failed."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    # In its own process, because torch would keep GPU memory in this one.
    command = [sys.executable, "-c", MACHINE]
    ended = subprocess.run(command, env={**os.environ, **hidden}, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        facts = {name: str(value) for name, value in parse_json(ended.stdout).items() if value}
    else:
        facts = {"torch failed": (ended.stderr.splitlines() or [f"exit code {ended.returncode}"])[-1]}
    installed = installed_packages()
    packages = {name: installed[name] for name in PACKAGES if name in installed}
    versions = {"project": __version__, "Python": platform.python_version()}
    return {"device": device, "GPU": "none", **versions, **facts, **packages}


def run_phase(phase: Phase, machine: dict[str, str]) -> None:
    """Run a phase and write its status (passed, failed, not run) to phases/NAME.json. If interrupted, write nothing."""
    print(f"{phase.name}: {PHASES[phase.name].__doc__}", flush=True)
    started = time.monotonic()
    status: Status
    if machine["GPU"] == "none" and (phase.device == "cuda" or phase.name in NEEDS_CUDA):
        status = "not run"
        phase.problems.append("needs a CUDA device, and torch finds none")
    else:
        try:
            PHASES[phase.name](phase)
        except Failed as error:
            phase.problems.append(str(error))
        except Exception as error:  # such as a missing figure or a full disk; the other phases still run
            traceback.print_exc()
            phase.problems.append(short_reason(error))
        phase.drop_checkpoints()
        status = "failed" if phase.problems else "passed"
    result = Result(
        status=status,
        date=datetime.date.today().isoformat(),
        seconds=round(time.monotonic() - started),
        problems=phase.problems,
        tables=phase.tables,
        commands=phase.commands,
        machine=machine,
    )
    content = json.dumps(asdict(result), indent=1)
    replace_file(phase.output / "phases" / f"{phase.name}.json", content + "\n")


def read_results(output: Path, machine: dict[str, str]) -> dict[str, Result]:
    """Return the results of phases that ended on this machine, in the order of PHASES.

    Damaged result files are ignored, so that their phases run again.
    """
    import msgspec

    results = {}
    for name in PHASES:
        with suppress(OSError, ValueError, TypeError, msgspec.ValidationError):
            result = msgspec.convert(parse_json(read_text(output / "phases" / f"{name}.json")), Result)
            if result.machine == machine:
                results[name] = result
    return results


def verdict(results: dict[str, Result], machine: dict[str, str]) -> str:
    """Return a line that says "accepted" if all phases have passed, or else lists failed, missing and passed phases."""
    phases: dict[str, list[str]] = {"failed": [], "not run": [], "passed": []}
    for name in PHASES:
        phases[results[name].status if name in results else "not run"].append(name)
    if len(phases["passed"]) == len(PHASES):
        return f"accepted: {machine['GPU']}"
    return "; ".join(["not accepted", *(f"{status}: {', '.join(names)}" for status, names in phases.items() if names)])


def write_report(output: Path, results: dict[str, Result], machine: dict[str, str]) -> None:
    """Write report.md to `output`, with each phase's result on this machine, commands and figures."""
    overview = [
        {"phase": name, "status": result.status, "seconds": result.seconds, "date": result.date}
        | {"problems": "; ".join(result.problems)}
        for name, result in results.items()
    ]
    blocks = [heading(f"Acceptance: {verdict(results, machine)}", 1), to_table([machine]), to_table(overview)]
    for name, result in results.items():
        blocks += [heading(name), code("\n".join(result.commands))]
        for title, rows in result.tables.items():
            blocks += [f"{title}:", to_table(rows)]
    replace_file(output / "report.md", "\n\n".join(filter(None, blocks)) + "\n")


def to_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table whose columns are the first row's keys, or "" if there are no rows."""
    cells = [[f"{value:,.6g}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return table(list(rows[0]), cells) if rows else ""


if __name__ == "__main__":
    run_command(main)
