"""The command lines of `neobert convert` and `neobert verify`: one dataclass of options each. Imports no package."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_neobert.cli import option

_CARD = "for the model card; without it as in the source"


def _read_size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d{0,5}(KB|MB|GB|TB)", text):
        raise ValueError("is no size such as 500MB or 5GB.")
    return text


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The command line of `neobert convert megatron-to-hf`."""

    load: Path = option(help="folder that training was given as --save", metavar="DIR")
    output: Path = option(help="folder to create", metavar="DIR")
    layout: Literal["eurobert", "neobert", "llama"] = option(
        "eurobert",
        "layout to write: eurobert needs no remote code; neobert has the published names",
        flag="--format",
    )
    tokenizer_model: Path | None = option(None, "tokenizer to write; without it the checkpoint's own")
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the stored weights")
    max_shard_size: str = option("5GB", "cut larger weights", metavar="SIZE", read=_read_size)
    sentence_transformers: bool = option(False, "add what SentenceTransformer(DIR) reads: mean pooling")
    iteration: int | None = option(None, "checkpoint to convert; without it the newest")
    all_iterations: bool = option(
        False, "convert every checkpoint into a subfolder of --output; folders that are there already are kept"
    )
    datasets: tuple[str, ...] = option(
        (), "data on the Hub, for the model card", flag="--dataset", metavar="OWNER/NAME"
    )
    push_to_hub: str | None = option(
        None,
        "upload the folder to this model on the Hub, created private where there is none",
        metavar="OWNER/NAME",
    )
    revision: str | None = option(
        None,
        "branch to upload to; without it main, and with --all-iterations each to iteration-N, the newest to main too",
        metavar="NAME",
    )
    license: str | None = option(None, f"licence of the weights, such as apache-2.0, {_CARD}", metavar="ID")
    base_model: str | None = option(None, f"model on the Hub that training begins from, {_CARD}", metavar="OWNER/NAME")
    no_verification: bool = option(False, "do not run the written model against its source")

    @property
    def choices(self) -> dict[str, Any]:
        """Options that the files depend on besides layout and dtype."""
        return {name: getattr(self, name) for name in ("max_shard_size", "sentence_transformers")}


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The command line of `neobert convert hf-to-megatron`."""

    load: Path = option(help="Hugging Face folder with a masked language model", metavar="DIR")
    output: Path = option(help="folder to create, for training's --continue-from", metavar="DIR")
    drop_padded_vocabulary: bool = option(False, "cut off rows of zeros behind the tokenizer's last id")
    license: str | None = option(None, f"licence of the weights, such as apache-2.0, {_CARD}", metavar="ID")
    base_model: str | None = option(None, f"model on the Hub that training begins from, {_CARD}", metavar="OWNER/NAME")
    no_verification: bool = option(False, "do not run the written model against its source")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The command line of `neobert verify`."""

    first: Path = option(help="folder of checkpoints, or Hugging Face folder", positional=True, metavar="A")
    second: Path = option(help="the same", positional=True, metavar="B")
    tolerance: float | None = option(
        None,
        "largest difference that still counts as equal, over the largest logit, and over the largest value of a "
        "weight; without it 1e-4 for logits, as after a conversion, and none for weights (rounded to bfloat16 on one "
        "side, logits differ by 0.015)",
        minimum=0,
    )
