"""A folder of checkpoints as files: which of them count, and whether they are whole. Needs no torch.

    SAVE/latest_checkpointed_iteration.txt      the newest iteration
    SAVE/iter_0001000/                          settings.yaml  tokenizer/  common.pt  metadata.json  .metadata  *.distcp
    SAVE/iter_0001000/MANIFEST.json             size and sha256 of every file; written last

A checkpoint counts when its folder has its final name and a manifest.
"""

import json
import re
from pathlib import Path

from megatron_neobert.config import CheckpointConfig
from megatron_neobert.errors import CheckpointError, MissingInputError, OutputError
from megatron_neobert.files import replace_file, sha256_of, sync_to_disk

_POINTER = "latest_checkpointed_iteration.txt"
_MANIFEST = "MANIFEST.json"


def iteration_folder(save: Path, iteration: int) -> Path:
    return save / f"iter_{iteration:07d}"


def list_checkpoints(save: Path) -> list[Path]:
    """Folders of the checkpoints that count, newest first; nothing else is looked at."""
    folders = (manifest.parent for manifest in save.glob(f"iter_*/{_MANIFEST}"))
    numbered = [folder for folder in folders if re.fullmatch(r"iter_\d{7,}", folder.name)]
    return sorted(numbered, key=lambda folder: int(folder.name.removeprefix("iter_")), reverse=True)


def latest_checkpoint(save: Path, *, iteration: int | None = None) -> Path:
    """The newest checkpoint of a save folder, or that of one iteration; its files are not verified.

    Raises:
        MissingInputError: There is none.
    """
    candidates = list_checkpoints(save)
    if iteration is not None:
        candidates = [candidate for candidate in candidates if candidate == iteration_folder(save, iteration)]
    if not candidates:
        wanted = "checkpoint" if iteration is None else f"checkpoint of iteration {iteration}"
        raise MissingInputError(f"{save} holds no {wanted}; name the folder given to --save.")
    return candidates[0]


def check_folders(config: CheckpointConfig) -> None:
    """Refuses folders that a run must not start with.

    Raises:
        MissingInputError: --load holds no checkpoint and is neither --save nor replaced by --continue-from; or the
            latter holds none.
        OutputError: --save holds checkpoints and is not --load, or cannot be created.
    """
    load = Path(config.load).resolve() if config.load is not None else None
    save = Path(config.save).resolve() if config.save is not None else None
    is_empty = load is None or not list_checkpoints(load)
    if config.continue_from is not None:
        if is_empty and not list_checkpoints(Path(config.continue_from)):
            raise MissingInputError(
                f"--continue-from {config.continue_from} holds no checkpoint (iter_*/{_MANIFEST}); check the path."
            )
    elif load and load != save and is_empty:
        raise MissingInputError(f"--load {config.load} holds no checkpoint (iter_*/{_MANIFEST}); check the path.")
    if save and save != load and list_checkpoints(save):
        raise OutputError(
            f"--save {config.save} already holds checkpoints of a run; give --load {config.save} to continue it, or "
            "name another folder."
        )
    if save:
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"--save {config.save} cannot be created ({error.strerror}); name another folder."
            ) from error


def verify_files(checkpoint: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        CheckpointError: Naming the first file that is missing or differs in size or sha256.
    """
    manifest = checkpoint / _MANIFEST
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expectations = [(name, int(file["bytes"]), str(file["sha256"])) for name, file in listed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest}: not readable ({error}); the checkpoint is incomplete.") from error
    for name, expected_bytes, expected_sha256 in expectations:
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, although the manifest lists it; use another checkpoint.")
        size = path.stat().st_size
        if size != expected_bytes:
            raise CheckpointError(f"{path}: {size} bytes, expected {expected_bytes}; use another checkpoint.")
        if sha256_of(path) != expected_sha256:
            raise CheckpointError(f"{path}: its sha256 is not the manifest's; it is damaged, use another checkpoint.")


def find_good_checkpoint(load: Path) -> tuple[Path, list[str]]:
    """The newest checkpoint whose files are whole, and what is wrong with newer ones.

    Raises:
        CheckpointError: None is whole.
    """
    problems: list[str] = []
    for candidate in list_checkpoints(load):
        try:
            verify_files(candidate)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return candidate, problems
    raise CheckpointError(f"--load {load}: no usable checkpoint. {' '.join(problems)}")


def write_manifest(folder: Path) -> None:
    """Seals a checkpoint folder: every file on disk, then the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files
    }
    for path in files:
        sync_to_disk(path)
    replace_file(folder / _MANIFEST, json.dumps({"format": 1, "files": listed}, indent=1))


def publish(temporary: Path, final: Path, *, iteration: int) -> None:
    """Makes a sealed folder a checkpoint by one rename, and the newest one by one replacement."""
    temporary.rename(final)
    sync_to_disk(final.parent)
    replace_file(final.parent / _POINTER, str(iteration))
