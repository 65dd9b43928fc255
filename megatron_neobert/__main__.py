"""The console command `neobert`, also `python -m megatron_neobert`: the table of all commands, and its dispatch.

A command has a name of one or two words and is a function. `cli.py` builds its command line from the dataclass that the
function takes. `neobert --help` imports none of these functions. argcomplete completes commands and flags in a shell
after: eval "$(register-python-argcomplete neobert)".
"""

from __future__ import annotations  # `check environment` runs on older Pythons too

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from megatron_neobert import __version__
from megatron_neobert.cli import run_function
from megatron_neobert.errors import ConfigError, run_command, suggestion

COMMON, DATA = "megatron_neobert.commands", "megatron_neobert.data"
EVALUATION, INSPECTION = "megatron_neobert.evaluation.commands", "megatron_neobert.inspection"
CONVERSION = "checkpoint_conversion"
CONVERT = f"{CONVERSION}.convert"
# Group -> command -> (module:function, purpose in --help and docs/commands.md).
COMMANDS = {
    "Data": {
        "sample-corpus": (f"{COMMON}.sample_corpus:write_sample_corpus", "write sample texts from installed packages"),
        "train-tokenizer": (f"{DATA}.tokenizer.train:train_tokenizer", "train a WordPiece tokenizer"),
        "preprocess": (f"{COMMON}.preprocess_data:preprocess_data", "tokenize raw text into a corpus (.bin and .idx)"),
        "validate": (f"{DATA}.corpus.inspection:validate", "check the files of a corpus"),
        "inspect data": (f"{DATA}.corpus.inspection:inspect_data", "show a summary or single documents of a corpus"),
        "adopt": (f"{DATA}.corpus.adoption:adopt_corpora", "use corpora of Megatron-LM without copying them"),
        "find-overlaps": (
            f"{DATA}.deduplication.overlaps:print_overlaps",
            "list documents that share text with evaluation sets",
        ),
        "find-duplicates": (f"{DATA}.deduplication.run:print_duplicates", "list near-duplicate documents of corpora"),
    },
    "Training": {
        "recipe": ("megatron_neobert.planning.recipe:write_recipe", "write a recipe for a model size or a budget"),
        "train": ("megatron_neobert.launch:train", "pre-train on the GPUs of this node, or on its CPU"),
        "plot": (f"{INSPECTION}.plot:plot", "plot loss, throughput and other curves of runs"),
        "inspect batch": (f"{INSPECTION}.batch:inspect_batch", "show the batch of one iteration"),
        "replay": (f"{INSPECTION}.replay:replay", "recompute losses and gradients of one iteration"),
        "average": (f"{CONVERSION}.average:average", "average the weights of a run's last checkpoints"),
    },
    "Models": {
        "convert megatron-to-hf": (f"{CONVERT}:megatron_to_hf", "convert a checkpoint to a Hugging Face model"),
        "convert hf-to-megatron": (f"{CONVERT}:hf_to_megatron", "convert a Hugging Face model to a checkpoint"),
        "verify": (f"{CONVERT}:verify", "check whether two models are equal"),
        "export-onnx": (f"{CONVERSION}.export_onnx:export_onnx", "export a Hugging Face model to ONNX"),
    },
    "Evaluation": {
        "evaluate classify": (f"{EVALUATION}:evaluate_classify", "fine-tune and evaluate on your own texts and labels"),
        "evaluate glue": (f"{EVALUATION}:evaluate_glue", "fine-tune and evaluate on GLUE as in the paper"),
        "evaluate mteb": (f"{EVALUATION}:evaluate_mteb", "evaluate on MTEB"),
        "evaluate ner": (f"{EVALUATION}:evaluate_ner", "fine-tune and evaluate named-entity recognition"),
        "evaluate ppl": (f"{EVALUATION}:evaluate_ppl", "measure pseudo-perplexity by document length"),
        "evaluate throughput": (f"{EVALUATION}:evaluate_throughput", "measure tokens/s by length and batch size"),
        "finetune": (f"{EVALUATION}:finetune", "fine-tune an encoder for embeddings (contrastive)"),
        "fetch mteb": (f"{EVALUATION}:fetch_mteb", "download the data of MTEB tasks"),
        "fetch contrastive": (f"{EVALUATION}:fetch_contrastive", "download the data of contrastive fine-tuning"),
        "report": (f"{EVALUATION}:report", "write one page with all results and the paper's"),
    },
    "This machine": {
        "check environment": (f"{COMMON}.environment:check_environment", "check whether this machine can train"),
        "check parity": (f"{COMMON}.check_parity:check_parity", "compare reference, Megatron and exported model"),
    },
}
FUNCTIONS = {name: function for group in COMMANDS.values() for name, (function, _) in group.items()}


def main() -> int | None:
    """Run the command that `sys.argv` names and return its exit code, or None for 0. Without a command, list all.

    Raises:
        ConfigError: There is no such command, or its flags are invalid. Errors of the command propagate too.
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
        raise ConfigError(_unknown(arguments))
    return run(name, arguments[len(name.split()) :])


def find_command(arguments: Sequence[str]) -> str | None:
    """Return the name of the command that the arguments start with, or None."""
    return next((name for name in FUNCTIONS if name.split() == list(arguments[: len(name.split())])), None)


def run(name: str, arguments: Sequence[str]) -> int | None:
    """Set `sys.argv`, run command `name`, and return its exit code, or None for 0. Bad flags raise ConfigError."""
    module, _, function_name = FUNCTIONS[name].partition(":")
    sys.argv = [f"neobert {name}", *arguments]
    function = getattr(importlib.import_module(module), function_name)
    if name == "train":  # parses sys.argv itself, because every rank does so too
        return function()
    return run_function(function, arguments, prog=sys.argv[0], run_flags=_run_flags)


def _run_flags() -> list[str]:
    from megatron_neobert.config.cli import run_flags

    return run_flags()


def _overview(typed: Sequence[str]) -> str:
    """Return the help text: commands by group. Only commands whose names start with the words `typed` are listed."""
    lines = ["usage: neobert COMMAND ...", "", "Pre-training of NeoBERT encoders, from raw text to an evaluated model."]
    width = max(map(len, FUNCTIONS))
    for group, commands in COMMANDS.items():
        shown = {name: purpose for name, (_, purpose) in commands.items() if name.split()[: len(typed)] == list(typed)}
        if shown:
            lines += ["", f"{group}:", *(f"  {name:{width}}  {purpose}" for name, purpose in shown.items())]
    return "\n".join([*lines, "", "neobert COMMAND --help shows the flags of a command; neobert --version."])


def _unknown(arguments: Sequence[str]) -> str:
    if second_words := _next_words(arguments[:1]):
        hint = suggestion(arguments[1], second_words, otherwise=".") if len(arguments) > 1 else "."
        return f"neobert {arguments[0]}: {' or '.join(second_words)} must follow{hint}"
    return f"neobert {arguments[0]}: no such command{suggestion(arguments[0], _next_words([]))}"


def _next_words(typed: Sequence[str]) -> list[str]:
    """Return the words that can follow `typed` in the name of a command, each once."""
    length = len(typed)
    names = [name.split() for name in FUNCTIONS]
    return list(dict.fromkeys(name[length] for name in names if len(name) > length and name[:length] == list(typed)))


def _complete() -> None:
    """Print completions (commands or flags) of the line in COMP_LINE and COMP_POINT, which the shell sets, and exit."""
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
