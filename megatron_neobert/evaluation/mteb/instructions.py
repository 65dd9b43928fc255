"""The instruction before each text of a task, read from YAML, in the spelling that a model was trained with.

`types` holds what stands before the texts of a kind of task, `tasks` what differs for single ones. Style `prefix`:
the instruction and a space, before queries and before the texts of symmetric tasks; documents stay as they are. Style
`paper`: what the wrapper of NeoBERT's release writes, before documents as well: instruction [SEP] [CLS] text.

Source: chandar-lab/NeoBERT scripts/evaluation/wrappers.py, which cannot run as released; so nobody can say whether
the paper's numbers come from that spelling.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.runtime.atomic_files import sha256_of

PromptStyle = Literal["prefix", "paper"]


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Texts by task name and by task type; without any, nothing is put before a text."""

    tasks: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    prefix: str = "{instruction} "
    before_documents: bool = False
    digest: str = "none"  # of the file they come from

    def prompt_for(self, metadata: Any, *, side: str | None) -> str | None:
        """What stands before a text.

        Args:
            metadata: mteb's, of the task.
            side: query, document, or None for the texts of a symmetric task.

        Returns:
            None for nothing at all: there is no instruction, or an empty one.
        """
        instruction = self._text_for(metadata)
        if not instruction or (side == "document" and not self.before_documents):
            return None
        return self.prefix.format(instruction=instruction)

    def refuse_gaps(self, tasks: list[Any]) -> None:
        """Raises ConfigError if there are instructions and a task has none: it would be measured another way."""
        if not self.tasks and not self.types:
            return
        gaps = sorted({task.metadata.name for task in tasks if self._text_for(task.metadata) is None})
        if gaps:
            raise ConfigError(
                f"--instructions has no text for {', '.join(gaps)}, neither under tasks nor for the type under types; "
                "add one (an empty one is one)."
            )

    def _text_for(self, metadata: Any) -> str | None:
        return self.tasks.get(metadata.name, self.types.get(metadata.type))


def read_instructions(path: Path, style: PromptStyle, tokenizer: Any) -> Instructions:
    """The instructions of a YAML file.

    Args:
        tokenizer: Of the model: style paper puts its separating and its first token between instruction and text.

    Raises:
        MissingInputError, DataError: There is no such file, or something else in it.
        ConfigError: Style paper, and the tokenizer has no such tokens.
    """
    if not path.is_file():
        raise MissingInputError(f"--instructions {path}: no such file; name a YAML file, or none.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is not YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(content, dict) or not content or not set(content) <= {"tasks", "types"}:
        raise DataError(f"{path}: expected the keys tasks and types, each with a text per name.")
    sections = {name: _texts(path, name, content.get(name) or {}) for name in ("tasks", "types")}
    return Instructions(
        **sections,
        prefix=_prefix(style, tokenizer),
        before_documents=style == "paper",
        digest=sha256_of(path)[:12],
    )


def _prefix(style: PromptStyle, tokenizer: Any) -> str:
    if style == "prefix":
        return "{instruction} "
    first = tokenizer.bos_token or tokenizer.cls_token
    if first is None or tokenizer.sep_token is None:
        raise ConfigError("--prompt-style paper needs a tokenizer with [SEP] and [CLS]; use --prompt-style prefix.")
    return "{instruction}" + f"{tokenizer.sep_token} {first}"


def _texts(path: Path, name: str, section: Any) -> dict[str, str]:
    if not isinstance(section, dict) or not all(isinstance(text, str) for text in section.values()):
        raise DataError(f"{path}: {name} is no mapping of names to texts.")
    return {str(key): text for key, text in section.items()}
