"""Checkpoints: what is written, when it counts, and which one is read.

The tensors go through megatron.core.dist_checkpointing, so another number of ranks or another tensor-parallel size can
read them. Round it stands a commit protocol: everything is written to a temporary folder, a manifest with the size and
sha256 of every file comes last, one rename makes the checkpoint exist, and one atomic replacement makes it the latest.

    SAVE/latest_checkpointed_iteration.txt
    SAVE/iter_0001000/   MANIFEST.json  settings.yaml  tokenizer/  common.pt  metadata.json  .metadata  *.distcp
"""

import json
import queue
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_neobert.config import Settings, flag_of
from megatron_neobert.data.batches import Cursor
from megatron_neobert.environment import is_rank_zero
from megatron_neobert.errors import CheckpointError, MissingInputError, OutputError
from megatron_neobert.files import replace_file, sha256_of, sync_to_disk
from megatron_neobert.flags import read_record, write_record
from megatron_neobert.training.run import Progress, Run

_POINTER = "latest_checkpointed_iteration.txt"
_MANIFEST = "MANIFEST.json"
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}

# With other values of these, the weights do not fit or the cursor names another row.
_MUST_MATCH = {
    "model": (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "swiglu_width",
        "rotary_base",
        "norm_epsilon",
    ),
    "data": ("seq_length", "long_documents", "split"),
    "training": ("seed",),
}

# megatron.core hands the results of a save over through a queue that it otherwise starts a process for (2.5 s); a
# synchronous save writes and reads it in this process.
filesystem_async._results_queue = queue.Queue()


def save_checkpoint(run: Run) -> Path:
    """Writes SAVE/iter_N and makes it the latest. Collective: all ranks."""
    save = Path(run.settings.checkpoint.save or "")
    final = save / f"iter_{run.progress.iteration:07d}"
    temporary = save / f".tmp-{final.name}"
    if is_rank_zero():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()  # collective: nobody writes before the folder exists
    if run.settings.parallel.overlap_param_gather:
        run.model.start_param_sync(force_sync=True)  # else the other ranks' newest weights would be missing
    dist_checkpointing.save(_sharded_state(run, loading=False), str(temporary))  # collective: all ranks
    if is_rank_zero():
        write_record(run.settings, temporary / "settings.yaml")
        run.tokenizer.save_tokenizer_files(
            temporary / "tokenizer", model_max_length=run.settings.model.max_position_embeddings
        )
        _write_manifest(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync_to_disk(save)
        replace_file(save / _POINTER, str(run.progress.iteration))
    torch.distributed.barrier()  # collective: nobody goes on before the checkpoint counts
    return final


def load_checkpoint(run: Run) -> Path | None:
    """Restores weights, optimizer and progress from the newest good checkpoint of --load.

    Returns:
        Its folder; None if --load is also --save and holds no checkpoint yet.

    Raises:
        MissingInputError: --load holds no checkpoint and is not --save.
        CheckpointError: None of the checkpoints is usable, or the newest belongs to another model or data order.

    Collective: all ranks.
    """
    config = run.settings.checkpoint
    load = Path(config.load or "")
    if not has_checkpoint(load):
        if config.save is not None and load.resolve() == Path(config.save).resolve():
            return None
        raise MissingInputError(f"--load {load} holds no checkpoint (no {load / _POINTER}); check the path.")
    choice: list[Any] = [_find_good(load) if is_rank_zero() else None]
    torch.distributed.broadcast_object_list(choice)  # collective: all ranks read the same one
    if isinstance(choice[0], CheckpointError):
        raise choice[0]
    folder = Path(choice[0])
    _refuse_other_run(run, read_record(folder / "settings.yaml"), folder)
    state = dist_checkpointing.load(_sharded_state(run, loading=True), str(folder))  # collective: all ranks
    progress = dict(state["progress"])
    if progress["corpus_sha256"] != run.progress.corpus_sha256:
        raise CheckpointError(
            f"{folder} was trained on the corpus with sha256 {progress['corpus_sha256'][:12]}, --data-path "
            f"{run.settings.data.data_path} has {run.progress.corpus_sha256[:12]}; its place in the data means nothing "
            "there. Name the corpus it was trained on."
        )
    run.unwrapped_model.load_state_dict(state["model"])
    with torch.no_grad():
        run.optimizer.load_state_dict(state["optimizer"])
    run.progress = Progress(**{**progress, "cursor": Cursor(**progress["cursor"])})
    run.scheduler.step(increment=run.progress.iteration)  # the schedule is a function of the iteration alone
    return folder


def refuse_to_mix_runs(settings: Settings) -> None:
    """Refuses a fresh start into a folder that holds the checkpoints of another run.

    Raises:
        OutputError: --save holds a checkpoint and --load is not given.
    """
    config = settings.checkpoint
    if config.save is not None and config.load is None and has_checkpoint(Path(config.save)):
        raise OutputError(
            f"--save {config.save} already holds checkpoints of a run; add --load {config.save} to continue it, or "
            "name another folder."
        )


def has_checkpoint(folder: Path) -> bool:
    """True if a run has committed a checkpoint to `folder`."""
    return (folder / _POINTER).is_file() or any(folder.glob("iter_*/" + _MANIFEST))


def latest_checkpoint(folder: Path, *, iteration: int | None = None) -> Path:
    """The newest committed checkpoint of a save folder, or that of one iteration; nothing is verified but its presence.

    Raises:
        MissingInputError: There is none.
    """
    candidates = _committed(folder)
    if iteration is not None:
        candidates = [candidate for candidate in candidates if candidate.name == f"iter_{iteration:07d}"]
    if not candidates:
        wanted = "checkpoint" if iteration is None else f"checkpoint of iteration {iteration}"
        raise MissingInputError(f"{folder} holds no {wanted}; name the folder given to --save.")
    return candidates[0]


def verify_files(checkpoint: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        CheckpointError: Naming the first file that is missing or differs in size or sha256.
    """
    try:
        listed = json.loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint / _MANIFEST}: not readable ({error}); the checkpoint is incomplete."
        ) from error
    for name, expected in listed.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, although the manifest lists it; use another checkpoint.")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: {path.stat().st_size} bytes, expected {expected['bytes']}; use another one."
            )
        if sha256_of(path) != expected["sha256"]:
            raise CheckpointError(f"{path}: sha256 differs from the manifest's; the file is damaged, use another one.")


def _sharded_state(run: Run, *, loading: bool) -> dict[str, Any]:
    model_state = run.unwrapped_model.sharded_state_dict()
    state = {
        "model": model_state,
        "optimizer": run.optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=_OPTIMIZER_FORMAT),
    }
    if not loading:
        state["progress"] = asdict(run.progress)
    return state


def _find_good(load: Path) -> str | CheckpointError:
    """The newest checkpoint whose files are whole; warns about those it skips."""
    problems = []
    for candidate in _committed(load):
        try:
            verify_files(candidate)
        except CheckpointError as error:
            problems.append(str(error))
            print(f"warning: skipped a damaged checkpoint: {error}", flush=True)
        else:
            return str(candidate)
    return CheckpointError(f"--load {load}: no usable checkpoint. " + " ".join(problems))


def _committed(folder: Path) -> list[Path]:
    """Folders of complete checkpoints, newest first."""
    return sorted((manifest.parent for manifest in folder.glob("iter_*/" + _MANIFEST)), reverse=True)


def _refuse_other_run(run: Run, saved: Settings, folder: Path) -> None:
    differences = [
        f"{flag_of(name)} was {getattr(getattr(saved, section), name)} and is now "
        f"{getattr(getattr(run.settings, section), name)}"
        for section, names in _MUST_MATCH.items()
        for name in names
        if getattr(getattr(saved, section), name) != getattr(getattr(run.settings, section), name)
    ]
    if differences:
        raise CheckpointError(
            f"{folder} belongs to another run: {'; '.join(differences)}. Start with the values in "
            f"{folder / 'settings.yaml'}."
        )


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files
    }
    for path in files:
        sync_to_disk(path)
    replace_file(folder / _MANIFEST, json.dumps({"format": 1, "files": listed}, indent=1))
