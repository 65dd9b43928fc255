"""Load a checkpoint into a run, and describe the state that checkpoints have.

megatron.core describes the shards that each rank holds (ShardedTensor), and contents.py finds them in the files. Each
rank reads its own shards, so that any number of ranks in any layout can load a checkpoint.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch import Tensor

from megatron_neobert.checkpoint.contents import StoredTensors, read_train_state
from megatron_neobert.checkpoint.folder import find_good_checkpoint, list_checkpoints, quarantine
from megatron_neobert.checkpoint.start import refuse_other_tokenizer
from megatron_neobert.config.cli import read_record
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.resume_rules import SavedRun, changes, refuse_unfit_checkpoint
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import CheckpointError
from megatron_neobert.runtime.environment import is_rank_zero
from megatron_neobert.state import Run

_MODEL = "model0"  # name of the model in Megatron's optimizers
# Every shard of a rank has its own name (the two halves of SwiGLU's first matrix have one each), and optimizer state is
# sharded like the weights, for any number of replicas.
_STATE_FORMAT = {
    "singleton_local_shards": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


class Found(NamedTuple):
    """A checkpoint whose files have been verified."""

    folder: Path
    has_new_data: bool  # it is of --continue-from, so its data may differ from this run's


def find_checkpoint(settings: Settings) -> Found | None:
    """Return the newest undamaged checkpoint of --load, else of --continue-from, the same on all ranks.

    Return None if neither has a checkpoint; `check_folders` has already checked that the run may start without one.

    Raises:
        CheckpointError: All checkpoints are damaged.

    Collective: all ranks.
    """
    config = settings.checkpoint
    for load in (config.load, config.continue_from):
        if load is not None and (folder := _find_in(settings, load)) is not None:
            return Found(folder, has_new_data=load != config.load)
    return None


def load_from(run: Run, folder: Path, *, has_new_data: bool = False) -> None:
    """Restore weights, optimizer and train state from a checkpoint whose files have been verified.

    Without optimizer state in the checkpoint, the optimizer starts with new state. Rank 0 prints what has changed since
    the checkpoint.

    Args:
        has_new_data: The checkpoint is of --continue-from, so its data may differ from this run's. If they differ, this
            run starts at the beginning of its data.

    Raises:
        CheckpointError, ConfigError: The checkpoint is of another model, data order, corpus or tokenizer.

    Collective: all ranks.
    """
    saved_settings = read_record(folder / "settings.yaml")
    train_state, optimizer = read_train_state(folder)
    weights_only = optimizer is None
    identities = run.training_stream.identities_at(train_state.iteration)
    saved = SavedRun(
        folder=folder,
        settings=saved_settings,
        iteration=train_state.iteration,
        data_identity=train_state.corpus_sha256,
        weights_only=weights_only,
    )
    refuse_unfit_checkpoint(saved, run.settings, identities, has_new_data=has_new_data)
    refuse_other_tokenizer(folder, load_tokenizer(folder / "tokenizer"), run.tokenizer)
    shards = _sharded_weights(run) if weights_only else sharded_state(run, loading=True)
    state = _read(shards, folder, optimizer)  # collective: all ranks
    if has_new_data:
        phase = phase_at(run.settings, train_state.iteration)
        saved_phase = phase_at(saved_settings, train_state.iteration).settings
        cursor = run.training_stream.cursor_in(
            phase, train_state.cursor, saved_phase, identity=train_state.corpus_sha256
        )
        train_state = replace(train_state, cursor=cursor)
    missing, unexpected = run.unwrapped_model.load_state_dict(state[_MODEL], strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    assert not missing and not unexpected, f"{missing=} {unexpected=}"
    if weights_only:
        _load_main_weights(run, state)
    else:
        _load_optimizer(run, state["optimizer"], folder)
    run.state = replace(train_state, corpus_sha256=identities[0])
    run.scheduler.step(increment=run.state.iteration)  # the learning rate depends on the iteration only
    if is_rank_zero():
        if has_new_data:
            start = (
                "start from the beginning" if train_state.cursor == Cursor() else f"continue at {train_state.cursor}"
            )
            rate = run.optimizer.param_groups[0]["lr"]
            print(f"continues {folder}: the learning rate is {rate:.2e} from here, the data {start}", flush=True)
        elif train_state.corpus_sha256 != identities[0]:
            print(f"{folder} does not record document boundaries, and is taken to be of this corpus", flush=True)
        for change in changes(saved_settings, run.settings, weights_only=weights_only):
            print(f"changed since {folder}: {change}", flush=True)


def sharded_state(run: Run, *, loading: bool) -> dict[str, Any]:
    """Return the state to save or load, as megatron.core describes it. Names do not depend on the layout."""
    model = _sharded_model(run.unwrapped_model)
    optimizer = run.optimizer.sharded_state_dict({_MODEL: model}, is_loading=loading, metadata=_STATE_FORMAT)
    if len(run.optimizer.chained_optimizers) > 1:
        optimizer = {str(number): state for number, state in optimizer.items()}  # keys of JSON objects are strings
    return {_MODEL: model, "optimizer": optimizer}


def _read(shards: dict[str, Any], folder: Path, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    """Return the state with tensors from the checkpoint, and with the optimizer's values that are not tensors.

    The tensors in `shards` are filled in place.

    Raises:
        CheckpointError: A file cannot be read or lacks a tensor. It is raised on all ranks.

    Collective: all ranks.
    """
    state, plain, factories = load_preprocess(shards)
    state, _ = extract_sharded_base(state)
    error: Exception | None = None

    def read(shard: ShardedTensor) -> Tensor:
        shard.init_data("cpu")  # allocates tensors that the optimizer does not have yet
        data = shard.data.detach()
        stored.read(shard.key, data, offsets=shard.global_offset, is_padded=shard.allow_shape_mismatch)
        return data

    try:
        stored = StoredTensors(folder)
        dict_list_map_inplace(read, state)
    except (CheckpointError, OSError) as own_error:
        error = own_error
    errors: list[Exception | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)  # collective: all ranks
    if first_error := next(filter(None, errors), None):
        raise first_error
    merge(state, plain)
    if optimizer is not None:
        merge(state, {"optimizer": optimizer})
    return apply_factory_merges(state, factories)


def _sharded_model(model: Any) -> dict[str, Any]:
    """Return the model's shards, without Transformer Engine's `_extra_state`, which are pickles for FP8 scaling."""
    return {
        name: value
        for name, value in model.sharded_state_dict(metadata=_STATE_FORMAT).items()
        if not name.endswith("_extra_state")
    }


def _load_optimizer(run: Run, state: dict[str, Any], folder: Path) -> None:
    """Restore moments, main weights and step counts. Learning rates, betas and epsilon are those of this start."""
    current = [
        {key: group[key] for key in group if key not in ("params", "step")} for group in run.optimizer.param_groups
    ]
    is_chained = len(run.optimizer.chained_optimizers) > 1
    try:
        for optimizer in state.values() if is_chained else [state]:
            # With main weights, the wrapped optimizer's state is one level deeper.
            for group in optimizer.get("optimizer", optimizer)["param_groups"]:
                if not isinstance(step := group.get("step", 0), (int, float)):
                    raise TypeError(f"step is {step!r:.40}, which is not a number")
                # Later releases match groups by their learning rates as well, which may have changed since the save.
                # Source: megatron-core 0.19.2 core/optimizer/optimizer.py `param_group_identifier_keys`.
                group.update(max_lr=current[0]["max_lr"], min_lr=current[0]["min_lr"])
        with torch.no_grad():
            run.optimizer.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: its optimizer state does not fit this model ({type(error).__name__}: {error}); use another "
            "checkpoint."
        ) from error
    for group, settings in zip(run.optimizer.param_groups, current, strict=True):
        group.update(settings)


def _sharded_weights(run: Run) -> dict[str, Any]:
    """Return fp32 shards to read weights into, also for a bfloat16 model, whose main weights must not be rounded."""
    model = _sharded_model(run.unwrapped_model)
    for tensor in model.values():
        tensor.data = torch.empty(tensor.data.shape, dtype=torch.float32, device=tensor.data.device)
        if isinstance(tensor, ShardedTensor):  # a ShardedTensorFactory takes the dtype of its data
            tensor.dtype = torch.float32
    return {_MODEL: model}


def _load_main_weights(run: Run, state: dict[str, Any]) -> None:
    """Copy loaded weights into the optimizer's fp32 main weights, which exist if the model is in bfloat16.

    Args:
        state: The loaded state; the weights of the model are in `state[_MODEL]`.
    """
    if run.settings.parallel.use_distributed_optimizer:
        run.optimizer.reload_model_params(state_dict=state)
        return
    for name, parameter in run.unwrapped_model.named_parameters():
        if hasattr(parameter, "main_param"):  # set by Megatron for parameters with main weights
            parameter.main_param.data.copy_(state[_MODEL][name])


def _find_in(settings: Settings, load: str) -> Path | None:
    """Return the newest undamaged checkpoint in a folder, the same on all ranks, or None if there are no checkpoints.

    Rank 0 prints a warning for each newer checkpoint that it skips. In the folder of --save, damaged checkpoints are
    renamed, so that --keep-last does not count them.

    Raises:
        CheckpointError: All checkpoints are damaged.

    Collective: all ranks.
    """
    result: list[Any] = [None]
    config = settings.checkpoint
    if is_rank_zero() and list_checkpoints(Path(load)):
        is_save = load == config.load and config.loads_save
        try:
            result[0], problems = find_good_checkpoint(Path(load))
            for folder, problem in problems:
                # After an OSError the checkpoint may be readable again later.
                is_damaged = isinstance(problem, CheckpointError)
                renamed = f" It is now {quarantine(folder).name}." if is_save and is_damaged else ""
                kind = "a damaged" if is_damaged else "an unreadable"
                print(f"warning: skipped {kind} checkpoint: {problem}{renamed}", flush=True)
        except (CheckpointError, OSError) as error:
            result[0] = error
    torch.distributed.broadcast_object_list(result)  # collective: all ranks
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]
