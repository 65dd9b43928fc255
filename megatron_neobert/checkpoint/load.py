"""State of a run that is saved, and loading of a checkpoint.

Which part of which tensor a rank holds is megatron.core's knowledge (its ShardedTensors), where the parts lie that of
contents.py; so another number of ranks or another layout reads what it needs. Every rank reads for itself.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

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

_MODEL = "model0"  # Megatron's optimizers look the model up by this name
# One name for each part that a rank holds (the two halves of SwiGLU's first matrix have one each), and the optimizer's
# state cut like the weights for any number of replicas.
_STATE_FORMAT = {
    "singleton_local_shards": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


def load_checkpoint(run: Run) -> Path | None:
    """Restore the run from the newest good checkpoint of --load, else of --continue-from, and return its folder.

    Without a checkpoint return None; `check_folders` has judged whether that is allowed. Collective: all ranks.
    """
    config = run.settings.checkpoint
    for load in (config.load, config.continue_from):
        if load is not None and (folder := _choose(run.settings, load)) is not None:
            load_from(run, folder, has_new_data=load != config.load)
            return folder
    return None


def load_from(run: Run, folder: Path, *, has_new_data: bool = False) -> None:
    """Restore weights, optimizer and train state from a checkpoint whose files are whole.

    With weights only, as a conversion writes them, the optimizer starts anew; so do other data, if `has_new_data`.

    Raises:
        CheckpointError: The checkpoint is of another model, data order, corpus or tokenizer.

    Collective: all ranks.
    """
    record = read_record(folder / "settings.yaml")
    train_state, optimizer = read_train_state(folder)
    weights_only = optimizer is None
    identities = run.training_stream.identities_at(train_state.iteration)
    saved = SavedRun(
        folder=folder,
        settings=record,
        iteration=train_state.iteration,
        data_identity=train_state.corpus_sha256,
        weights_only=weights_only,
    )
    refuse_unfit_checkpoint(saved, run.settings, identities, has_new_data=has_new_data)
    refuse_other_tokenizer(folder, load_tokenizer(folder / "tokenizer"), run.tokenizer)
    wanted = _state_of_weights(run) if weights_only else sharded_state(run, loading=True)
    state = _read(wanted, folder, optimizer)  # collective: all ranks
    if has_new_data:
        phase, then = phase_at(run.settings, train_state.iteration), phase_at(record, train_state.iteration).settings
        cursor = run.training_stream.cursor_in(phase, train_state.cursor, then, identity=train_state.corpus_sha256)
        train_state = replace(train_state, cursor=cursor)
    missing, unexpected = run.unwrapped_model.load_state_dict(state[_MODEL], strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    assert not missing and not unexpected, f"{missing=} {unexpected=}"
    if weights_only:
        _load_main_weights(run, state)
    else:
        _load_optimizer(run, state["optimizer"], folder)
    run.state = replace(train_state, corpus_sha256=identities[0])
    run.scheduler.step(increment=run.state.iteration)  # the schedule is a function of the iteration alone
    if is_rank_zero():
        if has_new_data:
            begins = "begin anew" if train_state.cursor == Cursor() else f"continue at {train_state.cursor}"
            rate = run.optimizer.param_groups[0]["lr"]
            print(f"continues {folder}: the learning rate is {rate:.2e} from here, the data {begins}", flush=True)
        if not has_new_data and train_state.corpus_sha256 != identities[0]:
            print(f"{folder} does not say where its documents begin, and is taken to be of this corpus", flush=True)
        for change in changes(record, run.settings, weights_only=weights_only):
            print(f"changed since {folder}: {change}", flush=True)


def sharded_state(run: Run, *, loading: bool) -> dict[str, Any]:
    """Return the state that is written or read. Tensors have their names in the whole model, in any layout."""
    model = _sharded_model(run.unwrapped_model)
    optimizer = run.optimizer.sharded_state_dict({_MODEL: model}, is_loading=loading, metadata=_STATE_FORMAT)
    if len(run.optimizer.chained_optimizers) > 1:
        optimizer = {str(number): state for number, state in optimizer.items()}  # as JSON has them
    return {_MODEL: model, "optimizer": optimizer}


def _read(wanted: dict[str, Any], folder: Path, optimizer: dict[str, Any] | None) -> dict[str, Any]:
    """Return the state with the tensors of the checkpoint and the optimizer's plain values.

    Collective: all ranks; an error of one of them is raised on all.
    """
    state, plain, factories = load_preprocess(wanted)
    state, _ = extract_sharded_base(state)
    error: Exception | None = None

    def read(wanted: ShardedTensor) -> Tensor:
        wanted.init_data("cpu")  # where the optimizer has none yet
        data = wanted.data.detach()
        stored.read(wanted.key, data, offsets=wanted.global_offset, is_padded=wanted.allow_shape_mismatch)
        return data

    try:
        stored = StoredTensors(folder)
        dict_list_map_inplace(read, state)
    except (CheckpointError, OSError) as found:
        error = found
    errors: list[Exception | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)  # collective: all ranks
    if problem := next(filter(None, errors), None):
        raise problem
    merge(state, plain)
    if optimizer is not None:
        merge(state, {"optimizer": optimizer})
    return apply_factory_merges(state, factories)


def _sharded_model(model: Any) -> dict[str, Any]:
    """Return the model's tensors, without Transformer Engine's `_extra_state`: pickles of delayed FP8 scaling."""
    return {
        name: value
        for name, value in model.sharded_state_dict(metadata=_STATE_FORMAT).items()
        if not name.endswith("_extra_state")
    }


def _load_optimizer(run: Run, state: dict[str, Any], folder: Path) -> None:
    """Restores moments, main weights and step counts; rates, betas and epsilon stay those of this start's settings."""
    wanted = [
        {key: group[key] for key in group if key not in ("params", "step")} for group in run.optimizer.param_groups
    ]
    is_chained = len(run.optimizer.chained_optimizers) > 1
    try:
        # Later releases pair the groups by their rates as well, which this start may have changed.
        # Source: megatron-core 0.19.2 core/optimizer/optimizer.py `param_group_identifier_keys`.
        for part in state.values() if is_chained else [state]:
            for group in part.get("optimizer", part)["param_groups"]:  # the outer level is that of main weights
                if not isinstance(step := group.get("step", 0), (int, float)):
                    raise TypeError(f"step is {step!r:.40}, no number")
                group.update(max_lr=wanted[0]["max_lr"], min_lr=wanted[0]["min_lr"])
        with torch.no_grad():
            run.optimizer.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: its optimizer state is not that of these parameters ({type(error).__name__}: {error}); use "
            "another checkpoint."
        ) from error
    for group, settings in zip(run.optimizer.param_groups, wanted, strict=True):
        group.update(settings)


def _state_of_weights(run: Run) -> dict[str, Any]:
    """Return fp32 tensors to read weights into, also for a bfloat16 model: main weights must not be rounded."""
    model = _sharded_model(run.unwrapped_model)
    for tensor in model.values():
        tensor.data = torch.empty(tensor.data.shape, dtype=torch.float32, device=tensor.data.device)
        if isinstance(tensor, ShardedTensor):  # and not a factory of several, which reads it from its data
            tensor.dtype = torch.float32
    return {_MODEL: model}


def _load_main_weights(run: Run, state: dict[str, Any]) -> None:
    """The optimizer's own copy of weights that are kept in less than fp32; its moments start at zero."""
    if run.settings.parallel.use_distributed_optimizer:
        run.optimizer.reload_model_params(state_dict=state)
        return
    for name, parameter in run.unwrapped_model.named_parameters():
        if hasattr(parameter, "main_param"):  # Megatron sets it where there is such a copy
            parameter.main_param.data.copy_(state[_MODEL][name])


def _choose(settings: Settings, load: str) -> Path | None:
    """Return the newest whole checkpoint, the same on all ranks, or None; warn of newer ones that are not whole.

    Damaged checkpoints are renamed where this run is going to save, so that they do not count as kept.

    Collective: all ranks.
    """
    choice: list[Any] = [None]
    config = settings.checkpoint
    if is_rank_zero() and list_checkpoints(Path(load)):
        owns = load == config.load and config.loads_save
        try:
            choice[0], problems = find_good_checkpoint(Path(load))
            for folder, problem in problems:
                is_damaged = isinstance(problem, CheckpointError)  # an unreadable one may be readable tomorrow
                aside = f" It is now {quarantine(folder).name}." if owns and is_damaged else ""
                kind = "a damaged" if is_damaged else "an unreadable"
                print(f"warning: skipped {kind} checkpoint: {problem}{aside}", flush=True)
        except (CheckpointError, OSError) as error:
            choice[0] = error
    torch.distributed.broadcast_object_list(choice)  # collective: all ranks read the same one, or none does
    if isinstance(choice[0], Exception):
        raise choice[0]
    return choice[0]
