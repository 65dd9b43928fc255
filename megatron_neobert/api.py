"""The names that programs may import. They and their arguments stay between releases; docs/python.md shows each."""

from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.export import export
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.batch import RankPosition, build_stream
from megatron_neobert.data.batches.corpora import open_phases
from megatron_neobert.data.batches.loader import build_loader
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.preprocessing.filters import Record
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.runtime.distributed import initialize, shut_down

__all__ = [
    "Corpus",
    "NeoBERTModel",
    "RankPosition",
    "Record",
    "build_loader",
    "build_stream",
    "export",
    "initialize",
    "load_tokenizer",
    "open_phases",
    "parse_settings",
    "read_checkpoint",
    "shut_down",
]


def parse_settings(*flags: str, ranks: int = 1) -> Settings:
    """Return the settings of `neobert train` with these flags, checked for a run on `ranks` ranks.

    Raise ConfigError, which lists all problems, if the flags or the --config file are invalid.
    """
    return parse_command_line(list(flags), world_size=ranks).settings
