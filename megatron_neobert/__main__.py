"""The console command `neobert`, also `python -m megatron_neobert`: one name for every command of this project.

A command has a name of one word or two and is a function of a module; `cli.py` makes its command line from the
dataclass that the function takes. `neobert --help` imports none of these modules. Completion in a shell is
argcomplete's: eval "$(register-python-argcomplete neobert)".
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

OWN, DATA = "megatron_neobert.commands", "megatron_neobert.data"
EVALUATION, INSPECTION = "megatron_neobert.evaluation.commands", "megatron_neobert.inspection"
FETCHING, CONVERSION = "megatron_neobert.evaluation.fetch", "checkpoint_conversion"
COMMANDS = {
    "Data": {
        "sample-corpus": (f"{OWN}.sample_corpus:write_sample_corpus", "a small real corpus: installed documentation"),
        "train-tokenizer": (f"{DATA}.tokenizer.train:train_tokenizer", "learn a WordPiece vocabulary"),
        "preprocess": (f"{OWN}.preprocess_data:preprocess_data", "raw text to Megatron's .bin and .idx"),
        "validate": (f"{DATA}.corpus.inspection:validate", "check a corpus, to the byte"),
        "inspect data": (f"{DATA}.corpus.inspection:inspect_data", "what is in a corpus; documents as text and ids"),
        "adopt": (f"{DATA}.corpus.adoption:adopt_corpora", "use a corpus that Megatron-LM wrote, in place"),
        "find-duplicates": (f"{DATA}.deduplication.run:print_duplicates", "near-duplicates of corpora, as a list"),
    },
    "Training": {
        "train": ("megatron_neobert.launch:train", "train on this node's GPUs, or NPROC_PER_NODE processes"),
        "plot": (f"{INSPECTION}.plot:plot", "loss, throughput and more as figures, run beside run"),
        "inspect batch": (f"{INSPECTION}.batch:inspect_batch", "the batch of one iteration as the model sees it"),
        "replay": (f"{INSPECTION}.replay:replay", "losses and gradients of one iteration again"),
        "average": (f"{CONVERSION}.average:average", "the mean of a run's last checkpoints"),
    },
    "Models": {
        "convert megatron-to-hf": (f"{CONVERSION}.convert:megatron_to_hf", "a checkpoint as a Hugging Face folder"),
        "convert hf-to-megatron": (f"{CONVERSION}.convert:hf_to_megatron", "a Hugging Face folder as a checkpoint"),
        "verify": (f"{CONVERSION}.convert:verify", "whether two models are the same"),
        "model-card": (f"{CONVERSION}.card:rewrite_model_card", "the model card, with results"),
        "export-onnx": (f"{CONVERSION}.export_onnx:export_onnx", "a Hugging Face folder as ONNX"),
    },
    "Evaluation": {
        "evaluate glue": (f"{EVALUATION}:evaluate_glue", "GLUE by the paper's protocol"),
        "evaluate mteb": (f"{EVALUATION}:evaluate_mteb", "MTEB, or your own tasks"),
        "evaluate ner": (f"{EVALUATION}:evaluate_ner", "named-entity recognition: seqeval's F1"),
        "evaluate ppl": (f"{EVALUATION}:evaluate_ppl", "pseudo-perplexity against length"),
        "evaluate throughput": (f"{EVALUATION}:evaluate_throughput", "tokens per second against length and batch size"),
        "finetune": (f"{EVALUATION}:finetune", "contrastive fine-tuning, for MTEB"),
        "fetch mteb": (f"{FETCHING}:fetch_mteb", "MTEB's data"),
        "fetch contrastive": (f"{FETCHING}:fetch_contrastive", "the data of contrastive fine-tuning"),
        "report": (f"{EVALUATION}:report", "all results on one page, beside the paper's numbers"),
    },
    "This machine": {
        "check environment": (f"{OWN}.environment:check_environment", "whether this machine can train, or why not"),
        "check parity": (f"{OWN}.check_parity:check_parity", "reference and Megatron model with the same weights"),
    },
}
PLACES = {name: place for group in COMMANDS.values() for name, (place, _) in group.items()}


def main() -> int | None:
    """Find the command in the first words and run it with the others."""
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    words = sys.argv[1:]
    if not words or (words[-1] in ("-h", "--help") and _words_after(words[:-1])):
        print(_overview(words[:-1]))
        return 0
    if words == ["--version"]:
        print(f"neobert {__version__}")
        return 0
    name = find_command(words)
    if name is None:
        raise ConfigError(_unknown(words))
    return run(name, words[len(name.split()) :])


def find_command(words: Sequence[str]) -> str | None:
    """Return the command that the words begin with."""
    return next((name for name in PLACES if name.split() == list(words[: len(name.split())])), None)


def run(name: str, words: Sequence[str]) -> int | None:
    """Call the function of a command with these words as its command line, and return the exit code."""
    module, _, function_name = PLACES[name].partition(":")
    sys.argv = [f"neobert {name}", *words]
    function = getattr(importlib.import_module(module), function_name or "main")
    if not function.__code__.co_argcount:
        return function()
    return run_function(function, words, prog=sys.argv[0], run_flags=_run_flags)


def _run_flags() -> list[str]:
    from megatron_neobert.config.cli import run_flags

    return run_flags()


def _overview(typed: Sequence[str]) -> str:
    """The commands that begin with the words typed."""
    lines = ["usage: neobert COMMAND ...", "", "Pre-training of NeoBERT encoders, from raw text to an evaluated model."]
    width = max(map(len, PLACES))
    for group, commands in COMMANDS.items():
        meant = {name: words for name, (_, words) in commands.items() if name.split()[: len(typed)] == list(typed)}
        if meant:
            lines += ["", f"{group}:", *(f"  {name:{width}}  {words}" for name, words in meant.items())]
    return "\n".join([*lines, "", "neobert COMMAND --help explains each; neobert --version."])


def _unknown(words: Sequence[str]) -> str:
    if second := _words_after(words[:1]):
        meant = suggestion(words[1], second, otherwise=".") if len(words) > 1 else "."
        return f"neobert {words[0]}: {' or '.join(second)} must follow{meant}"
    return f"neobert {words[0]}: no such command{suggestion(words[0], _words_after([]))}"


def _words_after(typed: Sequence[str]) -> list[str]:
    """The next words of the names that begin with those typed."""
    length = len(typed)
    names = [name.split() for name in PLACES]
    return list(dict.fromkeys(name[length] for name in names if len(name) > length and name[:length] == list(typed)))


def _complete() -> None:
    """Answers a shell's question for what may follow: a command's words here, its flags in its own parser."""
    import argcomplete

    typed = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")[1:-1]
    if name := find_command(typed):
        os.environ["_ARGCOMPLETE"] = str(1 + len(name.split()))  # how many of the words are the program's name
        run(name, [])
    parser = argparse.ArgumentParser(add_help=False)
    for place in range(len(typed) + 1):
        parser.add_argument(f"word{place}", choices=_words_after(typed[:place]))
    argcomplete.autocomplete(parser)


def start() -> None:
    """The entry point of setup.py."""
    run_command(main)


if __name__ == "__main__":
    start()
