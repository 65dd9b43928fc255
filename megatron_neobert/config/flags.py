"""The flags of a run, one for each field of `schema.py`: --help shows what people use first, --help-all every one."""

import argparse
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from megatron_neobert.config.recipes import recipes
from megatron_neobert.config.schema import PhaseChange, Settings, flag_of
from megatron_neobert.errors import CommandParser, suggestion

SECTIONS = {section.name: typing.cast(type, section.type) for section in fields(Settings)}
TEXTS = tuple[str, ...]
PHASES = tuple[PhaseChange, ...]
_METAVARS = {int: "N", float: "X", str: "TEXT", TEXTS: "TEXT", PHASES: "YAML"}
FIRST = (
    *("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size"),
    *("data_path", "tokenizer_model", "seq_length", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters"),
    *("micro_batch_size", "global_batch_size", "train_iters", "bf16"),
    *("save", "load", "continue_from", "save_interval", "log_interval"),
)
# What transformers' TrainingArguments and example scripts call the same.
_OF_TRANSFORMERS = {
    "learning_rate": "--lr",
    "lr_scheduler_type": "--lr-decay-style",
    "max_grad_norm": "--clip-grad",
    "max_steps": "--train-iters",
    "num_train_epochs": "--train-iters",
    "num_epochs": "--train-iters",
    "epochs": "--train-iters",
    "warmup_steps": "--lr-warmup-iters",
    "per_device_train_batch_size": "--micro-batch-size",
    "gradient_accumulation_steps": "--global-batch-size",
    "max_seq_length": "--seq-length",
    "mlm_probability": "--mask-prob",
    "output_dir": "--save",
    "resume_from_checkpoint": "--load",
    "save_steps": "--save-interval",
    "eval_steps": "--eval-interval",
    "logging_steps": "--log-interval",
}


def run_flags() -> list[str]:
    """Every flag of a run."""
    return [flag for action in build_parser()._actions for flag in action.option_strings]


def flag_meant(unknown: str) -> str:
    """The end of a sentence about an unknown flag: which one it is here, or resembles."""
    own = _OF_TRANSFORMERS.get(unknown.lstrip("-").replace("-", "_"))
    return suggestion(unknown, run_flags()) if own is None else f"; did you mean {own!r}?"


def build_parser(*, shown: tuple[str, ...] = FIRST) -> argparse.ArgumentParser:
    """It knows every flag; its help shows those of the settings that are named."""
    parser = CommandParser(
        "Pre-trains a NeoBERT encoder. Precedence: defaults < --config FILE < flags.",
        prog="neobert train",
        usage="%(prog)s [--config FILE] [--SETTING VALUE ...]",
        argument_default=argparse.SUPPRESS,
        epilog="" if shown != FIRST else f"{len(FIRST)} of {len(_HELP)} settings; --help-all shows every one.",
    )
    add = parser.add_argument
    add("--help-all", action=_HelpAll, nargs=0, help="every setting, and exit")
    config_help = "YAML file with sections as below, or a recipe, such as tiny"
    _complete(add("--config", default=None, metavar="FILE", help=config_help), recipes())
    add("--dry-run", action="store_true", default=False, help="check, print what would run, and stop")
    for section, config in SECTIONS.items():
        group = parser.add_argument_group(section)
        for item in fields(config):
            kind = plain_type(item.type)[0]
            options: dict[str, Any] = {"help": _HELP[item.name] if item.name in shown else argparse.SUPPRESS}
            if kind is bool:
                group.add_argument(flag_of(item.name), action=argparse.BooleanOptionalAction, **options)
            else:
                choices = item.metadata["choices"] or ()
                metavar = "|".join(choices) or _METAVARS[kind]
                count = "+" if kind == TEXTS else None
                action = group.add_argument(flag_of(item.name), metavar=metavar, nargs=count, **options)
                if choices:
                    _complete(action, choices)
    return parser


def _complete(action: argparse.Action, values: Sequence[str]) -> None:
    """A shell is told these; not `choices`, for all problems of a command line are reported together."""
    setattr(action, "completer", lambda **_: values)  # noqa: B010  argcomplete's attribute


def plain_type(wanted: Any) -> tuple[type, bool]:
    """`int | None` as (int, True)."""
    if isinstance(wanted, types.UnionType):
        plain = next(part for part in typing.get_args(wanted) if part is not type(None))
        return plain, True
    return wanted, False


def _help_of(item: Any) -> str:
    default = item.default if item.default is not MISSING else None
    return item.metadata["help"] + ("" if default in (None, ()) else f" (default {str(default).replace('%', '%%')})")


_HELP = {item.name: _help_of(item) for config in SECTIONS.values() for item in fields(config)}


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        build_parser(shown=tuple(_HELP)).print_help()
        parser.exit()
