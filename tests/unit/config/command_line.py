"""Settings of a command line with a corpus and a tokenizer, and the problems with which it is refused."""

from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError

REQUIRED = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]


def parse(*flags: str, ranks: int = 1) -> Settings:
    return parse_command_line([*REQUIRED, *flags], world_size=ranks).settings


def problems_of(*flags: str, ranks: int = 1) -> list[str]:
    try:
        parse(*flags, ranks=ranks)
    except ConfigError as error:
        return error.problems
    return []
