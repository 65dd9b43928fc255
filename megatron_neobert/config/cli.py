"""Reading and writing of settings: command-line flags, YAML files, and the record that a run saves.

`schema.py` declares each setting once, and its flag, help line, YAML key and type check follow from that field. Flags
override the file, and the file overrides the defaults. All problems are reported together.
"""

import argparse
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

import megatron_neobert
from megatron_neobert.cli import Parser, add_flags, assign, excerpt, flag_of, option, option_fields, read_values
from megatron_neobert.config.phases import fit_micro_batches
from megatron_neobert.config.rules import find_problems, find_record_problems
from megatron_neobert.config.schema import PHASE_SETTINGS, ModelConfig, PhaseChange, Settings
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError, suggestion, yaml_reason

SECTIONS = {section.name: section.type for section in option_fields(Settings)}
_FIELDS = {item.name: item for config in SECTIONS.values() for item in option_fields(config)}
_SECTION_OF = {item.name: name for name, config in SECTIONS.items() for item in fields(config)}
_RECIPES = Path(megatron_neobert.__file__).with_name("configs")  # installed with the package, and found by name
# The settings that --help shows.
FIRST = (
    *("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size"),
    *("data_path", "tokenizer_model", "seq_length", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters"),
    *("micro_batch_size", "global_batch_size", "train_iters", "bf16"),
    *("save", "load", "continue_from", "save_interval", "log_interval"),
)
# A file with all settings has 6 KB, and a blend of a hundred corpora adds 10 KB. PyYAML parses 256 KB in seconds, but
# 10 MB in an hour.
_LARGEST_FILE_BYTES = 1 << 18
_MOST_GPUS = 1_000_000
_MOST_PHASES = 100  # each phase is checked and planned like a run


def _read_counts(values: list[str]) -> tuple[int, ...]:
    counts = ",".join(values).split(",")
    if not all(count.isascii() and count.isdigit() and 0 < int(count) <= _MOST_GPUS for count in counts):
        raise ValueError(f"is not a list of numbers from 1 to {_MOST_GPUS:,}, as in 8,64,256.")
    return tuple(map(int, counts))


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Flags of --dry-run."""

    gpus: tuple[int, ...] = option(
        (),
        "with --dry-run: numbers of GPUs for the table of time and price, as 8,64,256; the plan is for the first",
        metavar="N,N",
        read=_read_counts,
    )
    price: float | None = option(None, "with --dry-run: price of an hour on one GPU, in any currency", minimum=0.0)
    network_gbps: float = option(
        400.0,
        "with --dry-run: Gb/s of the network per GPU; a node with one adapter divides it by its GPUs",
        minimum=0.1,
    )


@dataclass(frozen=True)
class Command:
    """Parsed command line of `neobert train`."""

    settings: Settings
    dry_run: bool
    plan: PlanOptions
    world_size: int  # the first number of --gpus, or the environment's number of ranks


def parse_command_line(arguments: list[str], *, world_size: int, record: Path | None = None) -> Command:
    """Return the settings and the flags of --dry-run, checked for `world_size` ranks or the first number in --gpus.

    The micro-batch size is lowered until it divides a rank's share of a global batch. --dry-run needs no --data-path.

    Flags override the `--config` file. Without a file, they override the settings in `record`, which a run saved.
    Raise ConfigError with every problem of the file, the flags and their combination.
    """
    texts, _, problems = build_parser().parse(arguments)
    config, is_dry_run = texts.pop("config", None), texts.pop("dry_run", False)
    plan_texts = {item.name: texts.pop(item.name) for item in fields(PlanOptions) if item.name in texts}
    plan, plan_problems = read_values(PlanOptions, plan_texts)
    problems += plan_problems
    if plan_texts and not is_dry_run:
        problems.append(f"{', '.join(map(flag_of, plan_texts))} only changes the plan; add --dry-run, or remove it.")
    if plan is not None and plan.gpus:
        world_size = plan.gpus[0]
    values: dict[str, Any] = {}
    if path := record if config is None else find_config(config):
        problems += _merge_file(path, values)
    for name, text in texts.items():
        problems += _assign(values, name, text, source=flag_of(name))
    # Invalid values have been reported, and are replaced by their defaults.
    settings = fit_micro_batches(_build(values), world_size=world_size)
    needs_data = not is_dry_run or bool(settings.data.data_path)
    problems += find_problems(settings, world_size=world_size, needs_data=needs_data)
    if problems:
        raise ConfigError(problems)
    return Command(settings=settings, dry_run=is_dry_run, plan=plan, world_size=world_size)


def build_parser(*, shown: tuple[str, ...] = FIRST) -> Parser:
    """Return a parser of all flags of `neobert train`. Its help lists only the settings named in `shown`."""
    parser = Parser(
        "Pre-train a NeoBERT encoder. Flags override the --config file, which overrides the defaults.",
        prog="neobert train",
        usage="%(prog)s [--config FILE] [--SETTING VALUE ...]",
        argument_default=argparse.SUPPRESS,
        epilog="" if shown != FIRST else f"These are {len(FIRST)} of {len(_SECTION_OF)} settings; see --help-all.",
    )
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all settings and exit")
    config_help = "YAML file with the sections below, or the name of a recipe, such as tiny"
    config = parser.add_argument("--config", metavar="FILE", help=config_help)
    setattr(config, "completer", lambda **_: recipes())  # noqa: B010  argcomplete's attribute
    parser.add_argument("--dry-run", action="store_true", help="check all settings, print the plan of the run and exit")
    add_flags(parser, PlanOptions)
    add_flags(parser, Settings, is_shown=shown.__contains__, negatable=True)
    return parser


def run_flags() -> list[str]:
    """Return all flags of `neobert train`."""
    return build_parser().all_flags()


def recipes() -> list[str]:
    """Return the names of all recipes, such as `tiny` or `ablations/m8`."""
    return sorted(str(path.relative_to(_RECIPES).with_suffix("")) for path in _RECIPES.rglob("*.yaml"))


def find_config(text: str) -> Path:
    """Return the recipe named `text`, or `text` itself as a path if this file exists or there is no such recipe."""
    recipe = _RECIPES / f"{text}.yaml"
    return recipe if recipe.is_file() and not Path(text).is_file() else Path(text)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        build_parser(shown=tuple(_SECTION_OF)).print_help()
        parser.exit()


def read_settings(path: Path) -> Settings:
    """Return the settings in a YAML file. Only types are checked. Raise ConfigError with all problems of the file."""
    values: dict[str, Any] = {}
    if problems := _merge_file(path, values):
        raise ConfigError(problems)
    return _build(values)


def write_record(settings: Settings, path: Path) -> None:
    """Write all settings as YAML, including default values."""
    path.write_text(yaml.safe_dump(asdict(settings), sort_keys=False), encoding="utf-8")


def model_flags(model: ModelConfig) -> str:
    """Return the flags of `neobert train` that describe a model, as a single string. Default values are omitted."""
    default = ModelConfig()
    if model.ffn_width == replace(model, ffn_hidden_size=None).ffn_width:
        model = replace(model, ffn_hidden_size=None)
    differing = [item.name for item in fields(ModelConfig) if getattr(model, item.name) != getattr(default, item.name)]
    return " ".join(f"{flag_of(name)} {getattr(model, name)}" for name in differing)


def read_record(path: Path) -> Settings:
    """Return the settings that `write_record` saved.

    Raise CheckpointError if the file does not exist, is damaged, or has invalid values.
    """
    try:
        settings = read_settings(path)
        if problems := find_record_problems(settings):
            raise ConfigError(problems)
        return settings
    except (ConfigError, MissingInputError) as error:
        reason = " ".join(error.problems) if isinstance(error, ConfigError) else str(error)
        raise CheckpointError(
            f"{path}: not the settings of a run ({reason}). Use the version that wrote it, or another checkpoint."
        ) from error


# --- YAML ---


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML loader that refuses duplicate keys. The merge key `<<` is treated as an ordinary, unknown key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _merge_file(path: Path, values: dict[str, Any]) -> list[str]:
    """Add the settings in a YAML file to `values` as name -> value, and return error messages about the file.

    Raise MissingInputError if the file does not exist.
    """
    if not path.is_file():
        if path.is_dir():
            raise MissingInputError(f"--config {path}: is a folder; give a file.")
        hint = suggestion(str(path), recipes(), otherwise="; check the path.")
        raise MissingInputError(f"--config {path}: no such file (relative to {Path.cwd()}) or recipe{hint}")
    if (size := path.stat().st_size) > _LARGEST_FILE_BYTES:
        return [f"{path}: {size:,} bytes, and settings have at most {_LARGEST_FILE_BYTES:,}; give the right file."]
    yaml_bytes = path.read_bytes()  # outside the try block, which is for errors of YAML and not of the disk
    try:
        content = _load_yaml(yaml_bytes)
    except ConfigError as error:
        return [f"{path}: not readable as YAML: {error.problems[0]}; compare it with examples/configs."]
    if content is None:
        return []
    if not isinstance(content, dict):
        return [f"{path}: contains a {type(content).__name__}; expected the sections {', '.join(SECTIONS)}."]
    problems = []
    for section, entries in content.items():
        if section not in SECTIONS:
            name = _name_of(section)
            problems.append(f"{path}: unknown section {name}{suggestion(name, list(SECTIONS))}")
        elif entries is not None and not isinstance(entries, dict):
            problems.append(f"{path}: section {section} contains {excerpt(entries)}; expected 'name: value' lines.")
        else:
            for key, value in (entries or {}).items():
                name = _name_of(key)
                if (right_section := _SECTION_OF.get(name)) == section:
                    problems += _assign(values, name, value, source=f"{path}: {section}.{name}")
                    continue
                names = [item.name for item in fields(SECTIONS[section])]
                hint = f"; it belongs to section {right_section!r}." if right_section else suggestion(name, names)
                problems.append(f"{path}: unknown setting {section}.{name}{hint}")
    return problems


def _load_yaml(text: bytes | str) -> Any:
    try:
        content = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return yaml.load(content, Loader=_UniqueKeyLoader)  # noqa: S506  a SafeLoader
    except Exception as error:  # YAMLError, ValueError of int(), chr() or dates, RecursionError of deep nesting
        raise ConfigError(yaml_reason(error) or type(error).__name__) from error


def _name_of(key: Any) -> str:
    """Return a YAML key unchanged if it is a valid name, or else an excerpt for messages."""
    return key if isinstance(key, str) and key.isidentifier() and len(key) <= 80 else excerpt(key)


def _assign(values: dict[str, Any], name: str, value: Any, *, source: str) -> list[str]:
    """Store `value`, converted to the type of its setting, in `values`. Return error messages, or [].

    An invalid value is not stored. If a phase is invalid, only the phases before it are stored.
    """
    if name != "phases":
        return assign(values, _FIELDS[name], value, source=source)
    values[name], problems = _read_phases(value, source=source)
    return problems


def _read_phases(value: Any, *, source: str) -> tuple[tuple[PhaseChange, ...], list[str]]:
    """Parse a list of phases, or a YAML text that contains a list. Return the phases, none for None, and errors."""
    if isinstance(value, str):
        try:
            value = _load_yaml(value)
        except ConfigError as error:
            return (), [f"{source} {excerpt(value)} is not YAML: {' '.join(error.problems)}"]
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "after_iters" in entry for entry in entries
    ):
        example = "[{after_iters: 1000, mask_prob: 0.15}]"
        return (), [f"{source} {excerpt(value)} is not a list of phases; each needs after_iters, as in {example}."]
    if len(entries) > _MOST_PHASES:
        return (), [f"{source} has {len(entries):,} phases, more than {_MOST_PHASES}; merge some."]
    settings = {item.name: item for item in option_fields(PhaseChange)}
    phases, problems = [], []
    for number, entry in enumerate(entries, start=1):
        values: dict[str, Any] = {}
        for key, setting_value in entry.items():
            name = _name_of(key)
            phase = f"{source}: phase {number}: "
            if name in settings:
                problems += assign(values, settings[name], setting_value, source=f"{phase}{name}")
            elif name in _SECTION_OF:
                problems.append(f"{phase}{name} cannot change within a run; a phase takes {', '.join(PHASE_SETTINGS)}.")
            else:
                problems.append(f"{phase}unknown setting {name}{suggestion(name, list(PHASE_SETTINGS))}")
        if not problems:
            phases.append(PhaseChange(**values))
    return tuple(phases), problems


def _build(values: dict[str, Any]) -> Settings:
    return Settings(
        **{
            section: config(**{item.name: values[item.name] for item in fields(config) if item.name in values})
            for section, config in SECTIONS.items()
        }
    )
