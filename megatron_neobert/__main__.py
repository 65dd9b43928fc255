"""The console command `neobert`, also `python -m megatron_neobert`: the table of all commands, and its dispatch.

A command has a name of one or two words and is a function in `commands/`. `cli.py` builds its command line from the
dataclass that the function takes. `neobert --help` imports none of these functions. argcomplete completes commands and
flags in a shell after: eval "$(register-python-argcomplete neobert)".
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from megatron_neobert import __version__
from megatron_neobert.cli import run_function
from megatron_neobert.errors import ConfigError, run_command, suggestion

# Group -> command -> purpose in --help and docs/commands.md. `neobert evaluate glue` runs evaluate_glue in
# commands/evaluate.py: the module has the first word of the name, the function all words.
COMMANDS = {
    "Data": {
        "sample-corpus": "write sample texts from installed packages",
        "train-tokenizer": "train a WordPiece tokenizer",
        "preprocess": "tokenize raw text into a corpus (.bin and .idx)",
        "validate": "check the files of a corpus",
        "inspect data": "show a summary or single documents of a corpus",
        "adopt": "use corpora of Megatron-LM without copying them",
        "find-overlaps": "list documents that share text with evaluation sets",
        "find-duplicates": "list near-duplicate documents of corpora",
    },
    "Training": {
        "recipe": "write a recipe for a model size or a budget",
        "train": "pre-train on the GPUs of this node, or on its CPU",
        "plot": "plot loss, throughput and other curves of runs",
        "inspect batch": "show the batch of one iteration",
        "replay": "recompute losses and gradients of one iteration",
        "average": "average the weights of a run's last checkpoints",
    },
    "Models": {
        "convert megatron-to-hf": "convert a checkpoint to a Hugging Face model",
        "convert hf-to-megatron": "convert a Hugging Face model to a checkpoint",
        "verify": "check whether two models are equal",
        "export-onnx": "export a Hugging Face model to ONNX",
    },
    "Evaluation": {
        "evaluate classify": "fine-tune and evaluate on your own texts and labels",
        "evaluate glue": "fine-tune and evaluate on GLUE as in the paper",
        "evaluate mteb": "evaluate on MTEB",
        "evaluate ner": "fine-tune and evaluate named-entity recognition",
        "evaluate ppl": "measure pseudo-perplexity by document length",
        "evaluate throughput": "measure tokens/s by length and batch size",
        "train-embedder": "fine-tune an encoder for embeddings (contrastive)",
        "fetch mteb": "download the data of MTEB tasks",
        "report": "write one page with all results and the paper's",
    },
    "This machine": {
        "check environment": "check whether this machine can train",
        "check parity": "compare reference, Megatron and exported model",
    },
}
NAMES = [name for commands in COMMANDS.values() for name in commands]


def main() -> int | None:
    """Run the command in `sys.argv` and return its exit code, or None for 0. Without arguments, list all commands.

    Raise ConfigError if the command is unknown or its flags are invalid.
    """
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    arguments = sys.argv[1:]
    if not arguments or (arguments[-1] in ("-h", "--help") and _next_words(arguments[:-1])):
        print(_overview(arguments[:-1]))
        return 0
    if arguments == ["--version"]:
        print(f"neobert {__version__}")
        return 0
    name = find_command(arguments)
    if name is None:
        word, *others = arguments
        if second_words := _next_words([word]):
            hint = suggestion(others[0], second_words, otherwise=".") if others else "."
            raise ConfigError(f"neobert {word}: {' or '.join(second_words)} must follow{hint}")
        raise ConfigError(f"neobert {word}: no such command{suggestion(word, _next_words([]))}")
    return run(name, arguments[len(name.split()) :])


def find_command(arguments: Sequence[str]) -> str | None:
    """Return the name of the command at the start of the arguments, or None if there is none."""
    return next((name for name in NAMES if name.split() == list(arguments[: len(name.split())])), None)


def run(name: str, arguments: Sequence[str]) -> int | None:
    """Set `sys.argv`, run command `name`, and return its exit code, or None for 0. Raise ConfigError for bad flags."""
    sys.argv = [f"neobert {name}", *arguments]
    # Names of files may contain bytes that are not text, and a terminal may not show all characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    words = name.replace("-", "_").split()
    function = getattr(importlib.import_module(f"megatron_neobert.commands.{words[0]}"), "_".join(words))
    if name == "train":  # parses sys.argv itself, because every rank does so too
        return function()
    return run_function(function, arguments, prog=sys.argv[0], run_flags=_run_flags)


def _run_flags() -> list[str]:
    from megatron_neobert.config.cli import run_flags

    return run_flags()


def _overview(typed: Sequence[str]) -> str:
    """Return the help text: commands by group. Only commands whose names start with the words `typed` are listed."""
    lines = ["usage: neobert COMMAND ...", "", "Pre-training of NeoBERT encoders, from raw text to an evaluated model."]
    width = max(map(len, NAMES))
    for group, commands in COMMANDS.items():
        shown = {name: purpose for name, purpose in commands.items() if name.split()[: len(typed)] == list(typed)}
        if shown:
            lines += ["", f"{group}:", *(f"  {name:{width}}  {purpose}" for name, purpose in shown.items())]
    return "\n".join([*lines, "", "neobert COMMAND --help shows the flags of a command; neobert --version."])


def _next_words(typed: Sequence[str]) -> list[str]:
    """Return the distinct words that can follow `typed` in the name of a command."""
    length = len(typed)
    names = [name.split() for name in NAMES]
    return list(dict.fromkeys(name[length] for name in names if len(name) > length and name[:length] == list(typed)))


def _complete() -> None:
    """Print completions (commands or flags) for the line in the shell's COMP_LINE and COMP_POINT, and exit."""
    import argcomplete

    typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")[1:-1]
    if name := find_command(typed):
        os.environ["_ARGCOMPLETE"] = str(1 + len(name.split()))  # number of words before the flags
        run(name, [])
    parser = argparse.ArgumentParser(add_help=False)
    for number in range(len(typed) + 1):
        parser.add_argument(f"word{number}", choices=_next_words(typed[:number]))
    argcomplete.autocomplete(parser)


def start() -> None:
    """Run the console script `neobert`; pyproject.toml names this function."""
    run_command(main)


if __name__ == "__main__":
    start()
