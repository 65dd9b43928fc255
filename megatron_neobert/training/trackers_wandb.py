"""A run at Weights & Biases, which only --wandb-project starts.

It is known by an id in the save folder, so that the same command goes on with the same run; WANDB_MODE, WANDB_ENTITY
and the like are W&B's own. Training outlives it: W&B hands values to a process of its own, and should that end, the run
says so once and goes on. Imported where it is used, but megatron.core imports the package wherever it is installed;
that starts nothing and sends nothing.
"""

import importlib.util
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime.atomic_files import replace_file

_ID_FILE = "wandb_id.txt"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REASON_LINES = 3  # of an error of W&B: a heading, the setting, what is wrong with it


def refuse_missing_wandb(settings: Settings) -> None:
    """Before anything slow is done.

    Raises:
        ConfigError: W&B is asked for and not installed.
    """
    if settings.logging.wandb_project is None:
        return
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # a folder named wandb, which W&B itself leaves behind, is no package
        raise ConfigError(
            f"--wandb-project {settings.logging.wandb_project} needs the package wandb, which is not installed; "
            "install it with pip install 'megatron-neobert[wandb]', or leave the flag out."
        )


class WandbRun:
    """A new run, or more of the one that this save folder began.

    Raises:
        ConfigError: W&B does not let it start.
    """

    def __init__(self, settings: Settings, *, say: Callable[[str], None]) -> None:
        self.say = say
        self.run: Any = _start(settings)  # None once it has ended

    def record(self, iteration: int, values: Mapping[str, float]) -> None:
        self._unless_ended(lambda run: run.log({"iteration": iteration, **values}))

    def close(self, *, failed: bool) -> None:
        """Waits until W&B has taken everything, or on disk if it is offline."""
        self._unless_ended(lambda run: run.finish(exit_code=int(failed)))

    def _unless_ended(self, use: Callable[[Any], None]) -> None:
        import wandb

        if self.run is None:
            return
        try:
            use(self.run)
        except (wandb.Error, OSError) as error:  # of the connection to W&B's own process on this machine
            self.run = None
            self.say(f"W&B takes no more values ({error}); the run goes on without it, metrics.jsonl has them all")


def _start(settings: Settings) -> Any:
    import wandb

    project, save = settings.logging.wandb_project, settings.checkpoint.save
    try:
        run = wandb.init(
            project=project,
            name=settings.logging.wandb_exp_name or (save and Path(save).resolve().name),
            id=save and _id_of(Path(save)),
            resume="allow",
            dir=save,
            config=asdict(settings),
            allow_val_change=True,  # of that config: a run may go on with another learning rate
            settings=wandb.Settings(console="off"),  # it would catch what the progress bar writes
        )
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: what it makes of a wrong WANDB_ variable
        reason = " ".join(" ".join(str(error).splitlines()[:_REASON_LINES]).split()).rstrip(".")
        raise ConfigError(
            f"--wandb-project {project}: W&B did not start ({reason}); correct what it names (a variable WANDB_...?), "
            "log in with wandb login or set WANDB_MODE=offline if it asks for a key, or leave the flag out."
        ) from error
    # W&B's own counter cannot go back, which a run does that was killed behind its last checkpoint.
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")
    return run


def _id_of(save: Path) -> str:
    """Drawn once per save folder: a run that branches off to another folder is another run.

    Raises:
        ConfigError: The file holds something else.
    """
    path = save / _ID_FILE
    if not path.exists():
        replace_file(path, secrets.token_hex(4) + "\n")
    identity = path.read_text(encoding="utf-8", errors="replace").strip()
    if not _ID.fullmatch(identity):
        raise ConfigError(
            f"{path} holds {identity[:80]!r}, which is no id of a run at W&B (letters, digits, - and _); write "
            "the id of this folder's run there, or delete the file to begin a new run at W&B."
        )
    return identity
