"""Runs this project's commands in forked copies of one process that has imported what they need: a second each.

A process of its own, because pytest's may have had a process group, and such a process cannot fork another that wants
one. Reads lines of JSON, [environment, module, argument, ...], and answers [exit code, what was printed].
"""

import importlib
import json
import os
import sys
import tempfile
import traceback

import torch

from megatron_neobert.errors import run_command
from megatron_neobert.training import loop  # noqa: F401  # megatron.core among others

torch.set_num_threads(1)  # a forked child must not wait for the threads of its parent


def run_forked(environment: dict[str, str], module: str, arguments: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.environ.update(environment)
            os._exit(run_here(module, arguments))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return code, output.read().decode()


def run_here(module: str, arguments: list[str]) -> int:
    sys.argv = [module, *arguments]
    try:
        run_command(importlib.import_module(module).main)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        environment, name, *words = json.loads(line)
        print(json.dumps(run_forked(environment, name, words)), file=answers, flush=True)
