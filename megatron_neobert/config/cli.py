"""The settings of a run as the user types them: flags, a YAML file, and the record saved with a run.

A field of `schema.py` is declared once; its flag, its help line, its place in the YAML file and its type check all
follow from the dataclass. Order of precedence: default < file < flag. All problems are reported together.
"""

import argparse
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast, get_type_hints

import yaml

from megatron_neobert.cli import Parser, add_flags, assign, excerpt, flag_of, typed_fields
from megatron_neobert.config.recipes import find_config, recipes
from megatron_neobert.config.rules import find_problems, find_record_problems
from megatron_neobert.config.schema import PHASE_SETTINGS, ModelConfig, PhaseChange, Settings
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError, suggestion, yaml_reason

SECTIONS = {name: cast(type, section) for name, section in get_type_hints(Settings).items()}
_SECTION_OF = {item.name: name for name, config in SECTIONS.items() for item in fields(config)}
FIRST = (
    *("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size"),
    *("data_path", "tokenizer_model", "seq_length", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters"),
    *("micro_batch_size", "global_batch_size", "train_iters", "bf16"),
    *("save", "load", "continue_from", "save_interval", "log_interval"),
)
# All settings take 6 KB, a blend of a hundred corpora 10 KB more. PyYAML reads this much in seconds, 10 MB in an hour.
_LARGEST_FILE_BYTES = 1 << 18
_MOST_PHASES = 100  # each is checked and planned as a run of its own
# Settings of earlier versions that the record of a run may hold. Some changed what a run computes; their value is fixed
# now. The others may differ when a run resumes.
_NOW_FIXED = {"muon_momentum": 0.95}
_NOW_IGNORED = {
    *("allow_changed", "attention_bounds", "check_for_nan"),
    *("check_weight_hash_across_dp_replicas_interval", "cross_entropy_fusion_impl"),
    *("cross_entropy_loss_fusion", "first_last_layers_bf16", "fp8_amax_compute_algo"),
    *("fp8_amax_history_len", "fp8_margin", "fp8_param_gather", "gradient_accumulation_fusion"),
    *("loss_spike_sigma", "loss_spike_window", "max_skipped_iters"),
    *("num_layers_at_end_in_bf16", "num_layers_at_start_in_bf16"),
    *("num_layers_per_virtual_pipeline_stage", "object_storage_cache_gb", "overlap_param_gather"),
    *("probe_data_path", "profile_step_end", "profile_step_start", "recompute_method"),
    *("recompute_num_layers", "resume", "save_initial", "sequence_parallel", "tensorboard_dir"),
    "wandb_exp_name",
}


@dataclass(frozen=True)
class Command:
    """Request of a command line."""

    settings: Settings
    dry_run: bool


def parse_command_line(arguments: list[str], *, world_size: int) -> Command:
    """Return the settings of flags and an optional `--config` file, checked for `world_size` ranks.

    Raises:
        ConfigError: With every problem found, in the file, the flags and their combination.
        MissingInputError: The file does not exist.
    """
    given, problems = build_parser().parse_all(arguments)
    config, is_dry_run = given.pop("config", None), given.pop("dry_run", False)
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    if config is not None:
        problems += _merge_file(find_config(config), values)
    for name, text in given.items():
        problems += _assign(values, _SECTION_OF[name], name, text, source=flag_of(name))
    settings = _build(values)
    problems += find_problems(settings, world_size=world_size)  # of the legal values, and defaults for the others
    if problems:
        raise ConfigError(problems)
    return Command(settings=settings, dry_run=is_dry_run)


def build_parser(*, shown: tuple[str, ...] = FIRST) -> Parser:
    """Return a parser that knows every flag; its help shows those of the settings that are named."""
    parser = Parser(
        "Pre-trains a NeoBERT encoder. Precedence: defaults < --config FILE < flags.",
        prog="neobert train",
        usage="%(prog)s [--config FILE] [--SETTING VALUE ...]",
        argument_default=argparse.SUPPRESS,
        epilog="" if shown != FIRST else f"{len(FIRST)} of {len(_SECTION_OF)} settings; --help-all shows every one.",
    )
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="every setting, and exit")
    config_help = "YAML file with sections as below, or a recipe, such as tiny"
    config = parser.add_argument("--config", metavar="FILE", help=config_help)
    setattr(config, "completer", lambda **_: recipes())  # noqa: B010  argcomplete's attribute
    parser.add_argument("--dry-run", action="store_true", help="check, print what would run, and stop")
    add_flags(parser, Settings, is_shown=shown.__contains__, negatable=True)
    return parser


def run_flags() -> list[str]:
    """Return every flag of a run."""
    return build_parser().all_flags()


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        build_parser(shown=tuple(_SECTION_OF)).print_help()
        parser.exit()


def read_settings(path: Path, *, is_record: bool = False) -> Settings:
    """Return the settings of a YAML file, each value checked for its type.

    Args:
        is_record: The file was written by a run, perhaps of a version with more settings.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    if problems := _merge_file(path, values, is_record=is_record):
        raise ConfigError(problems)
    return _build(values)


def write_record(settings: Settings, path: Path) -> None:
    """Saves the resolved settings, every default written out, as YAML."""
    path.write_text(yaml.safe_dump(asdict(settings), sort_keys=False), encoding="utf-8")


def model_flags(model: ModelConfig) -> str:
    """The flags that describe a model, those of the defaults left out; empty for the default model."""
    default = ModelConfig()
    if model.ffn_width == replace(model, ffn_hidden_size=None).ffn_width:
        model = replace(model, ffn_hidden_size=None)
    differing = [item.name for item in fields(ModelConfig) if getattr(model, item.name) != getattr(default, item.name)]
    return " ".join(f"{flag_of(name)} {getattr(model, name)}" for name in differing)


def read_record(path: Path) -> Settings:
    """Return the settings that `write_record` saved, or raise CheckpointError."""
    try:
        settings = read_settings(path, is_record=True)
        if problems := find_record_problems(settings):
            raise ConfigError(problems)
        return settings
    except (ConfigError, MissingInputError) as error:
        reason = " ".join(error.problems) if isinstance(error, ConfigError) else str(error)
        raise CheckpointError(
            f"{path}: not the settings of a run ({reason}); was it written by another version?"
        ) from error


# --- YAML ---


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key that stands twice is an error and not an overwrite.

    The merge key << would be such an overwrite, and is not known.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _merge_file(path: Path, values: dict[str, dict[str, Any]], *, is_record: bool = False) -> list[str]:
    """Add the content of a YAML file to `values`, and return its problems, each with the name of the file."""
    if not path.is_file():
        if path.is_dir():
            raise MissingInputError(f"--config {path}: is a folder, not a file.")
        meant = suggestion(str(path), recipes(), otherwise=".")
        raise MissingInputError(f"--config {path}: no such file (looked from {Path.cwd()}) or recipe{meant}")
    if (size := path.stat().st_size) > _LARGEST_FILE_BYTES:
        return [f"{path}: {size:,} bytes are more than {_LARGEST_FILE_BYTES:,}; no settings are that long. Is it YAML?"]
    content_bytes = path.read_bytes()  # apart from the parsing: an error of the disk is not one of the YAML
    try:
        content = _load_yaml(content_bytes)
    except ConfigError as error:
        return [f"{path}: not readable as YAML: {error.problems[0]}; compare it with examples/configs."]
    if content is None:
        return []
    if not isinstance(content, dict):
        return [f"{path}: holds a {type(content).__name__}; expected the sections {', '.join(SECTIONS)}."]
    problems = []
    for section, entries in content.items():
        if section not in SECTIONS:
            name = _name_of(section)
            problems.append(f"{path}: unknown section {name}{suggestion(name, list(SECTIONS))}")
        elif entries is not None and not isinstance(entries, dict):
            problems.append(f"{path}: section {section} holds {excerpt(entries)}; expected 'name: value' lines.")
        else:
            for key, value in (entries or {}).items():
                name = _name_of(key)
                source = f"{path}: {section}.{name}"
                if is_record and name in _NOW_FIXED and value != _NOW_FIXED[name]:
                    problems.append(f"{source} was {excerpt(value)}, and is always {_NOW_FIXED[name]} now.")
                    continue
                was_switch = name == "profile" and isinstance(value, bool)  # and is a range of iterations
                if not (is_record and (name in _NOW_FIXED or name in _NOW_IGNORED or was_switch)):
                    problems += _assign(values, section, name, value, source=source)
    return problems


def _load_yaml(text: bytes | str) -> Any:
    try:
        content = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return yaml.load(content, Loader=_UniqueKeyLoader)  # noqa: S506  a SafeLoader
    except Exception as error:  # besides YAMLError what int(), chr() or a date make of a value, or too deep nesting
        raise ConfigError(yaml_reason(error) or type(error).__name__) from error


def _name_of(key: Any) -> str:
    return key if isinstance(key, str) and key.isidentifier() and len(key) <= 80 else excerpt(key)


def _assign(values: dict[str, dict[str, Any]], section: str, name: str, value: Any, *, source: str) -> list[str]:
    """Put one value, converted to its field's type, into `values`; return what is wrong with it."""
    known = {item.name: (item, wanted) for item, wanted in typed_fields(SECTIONS[section])}
    if name not in known:
        home = _SECTION_OF.get(name)
        hint = f"; it belongs to section {home!r}." if home else suggestion(name, list(known))
        return [f"{source.rsplit(':', 1)[0]}: unknown setting {section}.{name}{hint}"]
    if name == "phases":
        values[section][name], problems = _read_phases(value, source=source)
        return problems
    return assign(values[section], *known[name], value, source=source)


def _read_phases(value: Any, *, source: str) -> tuple[tuple[PhaseChange, ...], list[str]]:
    """Phases out of a list, or a text that holds one as YAML; and what is wrong with them."""
    if isinstance(value, str):
        try:
            value = _load_yaml(value)
        except ConfigError as error:
            return (), [f"{source} {excerpt(value)} is not YAML: {' '.join(error.problems)}"]
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "after_iters" in entry for entry in entries
    ):
        return (), [
            f"{source} {excerpt(value)} is not a list of settings with the iterations that come before each, such "
            "as [{after_iters: 1000, mask_prob: 0.15}]."
        ]
    if len(entries) > _MOST_PHASES:
        return (), [f"{source} holds {len(entries):,} phases, more than {_MOST_PHASES}; merge some."]
    known = {item.name: (item, wanted) for item, wanted in typed_fields(PhaseChange)}
    phases, problems = [], []
    for number, entry in enumerate(entries, start=1):
        given: dict[str, Any] = {}
        for key, own in entry.items():
            name = _name_of(key)
            if name in known:
                problems += assign(given, *known[name], own, source=f"{source}: phase {number}: {name}")
            elif name in _SECTION_OF:
                allowed = ", ".join(PHASE_SETTINGS)
                problems.append(
                    f"{source}: phase {number}: {name} cannot change within a run; a phase takes {allowed}."
                )
            else:
                hint = suggestion(name, list(PHASE_SETTINGS))
                problems.append(f"{source}: phase {number}: unknown setting {name}{hint}")
        if not problems:
            phases.append(PhaseChange(**given))
    return tuple(phases), problems


def _build(values: dict[str, dict[str, Any]]) -> Settings:
    return Settings(**{name: config(**values[name]) for name, config in SECTIONS.items()})
