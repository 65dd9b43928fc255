"""Does a GPU compute here what the tests show on a CPU, and how fast?

    python tools/accept_gpu.py --output acceptance
    python tools/accept_gpu.py --output acceptance --phases parity speed
    python tools/accept_gpu.py --output rehearsal --device cpu      # a tiny model: tries the command, shows no GPU

Eight phases, each of ten minutes at most, on one GPU. Each starts commands of this project and holds their figures
against a limit; one that fails does not stop the others. Started again with the same output folder, what has passed
with the same GPU and versions is kept, and the rest is run. The folder gets report.md, report.json and everything that
was printed. Exit code 0: all phases that were asked for have passed; 1: one failed, or could not be run here.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert import __version__
from megatron_neobert.cli import Parser
from megatron_neobert.errors import OutputError, run_command, short_reason
from megatron_neobert.runtime.atomic_files import replace_file
from megatron_neobert.text import parse_json
from tools.acceptance.phases import CUDA_ALONE, PHASES, Failed, Phase

PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn")
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
MACHINE = """import json, torch
found = torch.cuda.is_available()
print(json.dumps({"GPU": torch.cuda.get_device_name() if found else None, "CUDA": torch.version.cuda,
                  "cuDNN": torch.backends.cudnn.version()}))"""


def main() -> int:
    """Run the phases and write the report after each; return 0 or 1."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the report; may exist")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny model (%(default)s)")
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    try:
        (output / "phases").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--output {output} cannot be created ({error.strerror}); name another folder.") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a phase's processes are ended as by Ctrl-C
    machine = describe_machine(arguments.device)
    asked = [name for name in PHASES if name in arguments.phases]
    for name in asked:
        kept = read_results(output, machine).get(name, {}).get("status") == PASSED
        if not kept:
            run_phase(Phase(name, output, arguments.device), machine)
        result = read_results(output, machine)[name]
        write_report(output, machine)
        status = f"{result['status']}{' before, kept' if kept else ''}"
        print(*[f"{name}: {status}, {result['seconds']} s", *result["problems"]], sep="\n  ", flush=True)
    print(f"report: {output / 'report.md'}\n{verdict(read_results(output, machine), asked, machine)}")
    return 0 if all(read_results(output, machine)[name]["status"] == PASSED for name in asked) else 1


def describe_machine(device: str) -> dict[str, str]:
    """Return the device and the versions that decide what a figure is worth."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
    # A process of its own: this one would hold memory of the GPU all the time.
    asked = subprocess.run(
        [sys.executable, "-c", MACHINE], env=environment, capture_output=True, text=True, check=False
    )
    found = parse_json(asked.stdout) if asked.returncode == 0 else {}
    installed = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    versions = {
        "project": __version__,
        "Python": platform.python_version(),
        **{name: str(found[name]) for name in found if found[name]},
    }
    packages = {name: installed[name] for name in PACKAGES if name in installed}
    return {"device": device, "GPU": "none"} | versions | packages


def run_phase(phase: Phase, machine: dict[str, str]) -> None:
    """Run a phase and keep what it found; an interrupted one keeps nothing."""
    print(f"{phase.name}: {PHASES[phase.name].__doc__}", flush=True)
    started, status = time.monotonic(), PASSED
    if machine["GPU"] == "none" and (phase.device == "cuda" or phase.name in CUDA_ALONE):
        status = NOT_RUN
        phase.problems.append("needs a CUDA device, and torch finds none")
    else:
        try:
            PHASES[phase.name](phase)
        except Failed as problem:
            phase.problems.append(str(problem))
        except Exception as error:  # a figure that is missing, a full disk: the other phases are to run all the same
            traceback.print_exc()
            phase.problems.append(short_reason(error))
        phase.drop_checkpoints()
        status = FAILED if phase.problems else PASSED
    result = {
        "status": status,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - started),
        "problems": phase.problems,
        "notes": phase.notes,
        "tables": phase.tables,
        "commands": phase.commands,
        "machine": machine,
    }
    replace_file(phase.output / "phases" / f"{phase.name}.json", json.dumps(result, indent=1) + "\n")


def read_results(output: Path, machine: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the phases that have ended on this machine, in their order; those of another are not looked at."""
    files = ((name, output / "phases" / f"{name}.json") for name in PHASES)
    found = {name: parse_json(file.read_text(encoding="utf-8")) for name, file in files if file.exists()}
    return {name: result for name, result in found.items() if result["machine"] == machine}


def verdict(results: dict[str, dict[str, Any]], asked: list[str], machine: dict[str, str]) -> str:
    """Return one line: accepted, or which phases stand against it."""
    against = [
        f"{status}: {', '.join(names)}"
        for status in (FAILED, NOT_RUN)
        if (names := [name for name in asked if results[name]["status"] == status])
    ]
    if against:
        return f"NOT accepted; {'; '.join(against)}"
    if machine["GPU"] == "none":
        return f"passed with a tiny model on a CPU, which shows nothing about a GPU: {', '.join(asked)}"
    missing = [name for name in PHASES if name not in results]
    return f"passed: {', '.join(asked)}; not yet: {', '.join(missing)}" if missing else f"accepted: {machine['GPU']}"


def write_report(output: Path, machine: dict[str, str]) -> None:
    """Write report.md and report.json of all phases that have ended."""
    from megatron_neobert.evaluation.pages import code, heading, paragraph

    results = read_results(output, machine)
    command = " ".join([Path(sys.executable).name, "tools/accept_gpu.py", *sys.argv[1:]])
    outcome = verdict(results, list(results), machine)
    overview = [
        {"phase": name, **{column: result[column] for column in ("status", "seconds", "date")}}
        for name, result in results.items()
    ]
    parts = [heading(f"Acceptance: {outcome}", 1), to_table([machine]), code(command), to_table(overview)]
    for name, result in results.items():
        parts += [heading(f"{name}: {result['status']}"), paragraph(PHASES[name].__doc__ or "")]
        parts += [f"- **{paragraph(problem)}**" for problem in result["problems"]]
        parts += [f"- {paragraph(note)}" for note in result["notes"]]
        for title, rows in result["tables"].items():
            parts += [paragraph(f"{title}:"), to_table(rows)] if rows else []
        parts += [code("\n".join(result["commands"]))] if result["commands"] else []
    replace_file(output / "report.md", "\n\n".join(parts) + "\n")
    content = {"verdict": outcome, "command": command, "machine": machine, "phases": results}
    replace_file(output / "report.json", json.dumps(content, indent=1) + "\n")


def to_table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown; columns are the keys of the first row."""
    from megatron_neobert.evaluation.pages import table

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    return table(list(rows[0]), [[cell(row[name]) for name in rows[0]] for row in rows])


if __name__ == "__main__":
    run_command(main)
