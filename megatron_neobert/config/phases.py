"""A phase of training: settings that change while a run trains. Standard library only."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, repr=False)
class Phase:
    """Settings that differ once so many iterations are done; what is None stays as it was."""

    after_iters: int
    data_path: tuple[str, ...] | None = None
    seq_length: int | None = None
    mask_prob: float | None = None
    mask_replacement: str | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None

    @property
    def changes(self) -> dict[str, Any]:
        """What it sets, by name."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        del given["after_iters"]
        return given

    @property
    def words(self) -> str:
        """What it sets, as flags."""
        given = {name: value if isinstance(value, tuple) else (value,) for name, value in self.changes.items()}
        return " ".join(f"--{name.replace('_', '-')} {' '.join(map(str, value))}" for name, value in given.items())

    def __repr__(self) -> str:
        """As YAML on one line."""
        given = {"after_iters": self.after_iters, **self.changes}
        return f"{{{', '.join(f'{name}: {json.dumps(value)}' for name, value in given.items())}}}"


PHASE_SETTINGS = tuple(item.name for item in fields(Phase))
