"""Saving and loading a run.

The tensors go through megatron.core.dist_checkpointing, so another number of ranks or another tensor-parallel size can
read them. Round it stands a commit protocol: everything is written to a temporary folder, the manifest comes last, one
rename makes the checkpoint exist, and one atomic replacement makes it the newest (checkpoint_files.py).
"""

import queue
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_neobert.config import Settings, flag_of
from megatron_neobert.data.blend import read_cursor
from megatron_neobert.data.rows import Cursor
from megatron_neobert.data.tokenizer import load_tokenizer
from megatron_neobert.environment import is_rank_zero
from megatron_neobert.errors import CheckpointError, ConfigError
from megatron_neobert.flags import read_record, write_record
from megatron_neobert.training.checkpoint_files import (
    find_good_checkpoint,
    iteration_folder,
    list_checkpoints,
    publish,
    write_manifest,
)
from megatron_neobert.training.checkpoint_metadata import SafeReader
from megatron_neobert.training.run import Progress, Run

_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}

# With other values of these, the weights do not fit or the cursor names another row.
_MUST_MATCH = {
    "model": (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_width",
        "swiglu",
        "normalization",
        "position_embedding_type",
        "position_rows",
        "rotary_base",
        "norm_epsilon",
    ),
    "data": ("seq_length", "long_documents", "batch_layout", "document_block_size", "share_of_data_path"),
    "training": ("seed",),
    # The optimizer's state is laid out by these.
    "parallel": ("use_distributed_optimizer",),
    "optimizer": ("weight_decay_scope",),
}

_SET_BY = {
    "ffn_width": "ffn_hidden_size",
    "share_of_data_path": "split",
    "position_rows": "max_position_embeddings",
}

# megatron.core hands the results of a save over through a queue that it otherwise starts a process for (2.5 s); a
# synchronous save writes and reads it in this process.
filesystem_async._results_queue = queue.Queue()


def save_checkpoint(run: Run) -> Path:
    """Writes SAVE/iter_N and makes it the latest. Collective: all ranks."""
    save = Path(run.settings.checkpoint.save or "")
    final = iteration_folder(save, run.progress.iteration)
    temporary = save / f".tmp-{final.name}"
    if is_rank_zero():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()  # collective: nobody writes before the folder exists
    if run.settings.parallel.overlap_param_gather:
        for model in run.models:
            model.start_param_sync(force_sync=True)  # else the other ranks' newest weights would be missing
    dist_checkpointing.save(_sharded_state(run, loading=False), str(temporary))  # collective: all ranks
    if is_rank_zero():
        write_record(run.settings, temporary / "settings.yaml")
        run.tokenizer.save_tokenizer_files(
            temporary / "tokenizer", model_max_length=run.settings.model.max_position_embeddings
        )
        write_manifest(temporary)
        shutil.rmtree(final, ignore_errors=True)
        publish(temporary, final, iteration=run.progress.iteration)
    torch.distributed.barrier()  # collective: nobody goes on before the checkpoint counts
    return final


def load_checkpoint(run: Run) -> Path | None:
    """Restores weights, optimizer and progress from the newest good checkpoint of --load, else of --continue-from.

    From the latter, the data starts anew, whatever they were.

    Returns:
        Its folder; None if there is no checkpoint yet (`check_folders` has said whether that is allowed).

    Raises:
        CheckpointError: None of the checkpoints is usable, or the newest belongs to another model or data order.

    Collective: all ranks.
    """
    config = run.settings.checkpoint
    folder = _choose(Path(config.load)) if config.load is not None else None
    has_new_data = folder is None
    if folder is None and config.continue_from is not None:
        folder = _choose(Path(config.continue_from))
    if folder is None:
        return None
    _refuse_other_run(run, read_record(folder / "settings.yaml"), folder, whole=not has_new_data)
    _refuse_other_tokenizer(run, folder)
    SafeReader(folder).read_metadata()  # refuses a table of contents that would run code when megatron reads it
    state = dist_checkpointing.load(_sharded_state(run, loading=True), str(folder))  # collective: all ranks
    progress = dict(state["progress"])
    if has_new_data:
        _refuse_ended_run(run, progress["iteration"])
        progress |= {"corpus_sha256": run.progress.corpus_sha256, "cursor": asdict(Cursor())}
    elif progress["corpus_sha256"] != run.progress.corpus_sha256:
        raise CheckpointError(
            f"{folder} was trained on the corpus with sha256 {progress['corpus_sha256'][:12]}, --data-path "
            f"{' '.join(run.settings.data.data_path)} has {run.progress.corpus_sha256[:12]}; its place in the data "
            "means nothing there. Name the corpus it was trained on; or, to go on with new data, give this folder as "
            "--continue-from and others as --save and --load."
        )
    for name, model in _named_models(run).items():
        _load_model(model, state[name])
    _load_optimizer(run, state["optimizer"])
    run.progress = Progress(**{**progress, "cursor": read_cursor(progress["cursor"])})
    run.scheduler.step(increment=run.progress.iteration)  # the schedule is a function of the iteration alone
    return folder


def _sharded_state(run: Run, *, loading: bool) -> dict[str, Any]:
    """What is written or read. Tensors are known by their names in the whole model, whatever stage holds them."""
    models = {name: _sharded_model(model) for name, model in _named_models(run).items()}
    state = {
        **models,
        "optimizer": run.optimizer.sharded_state_dict(models, is_loading=loading, metadata=_OPTIMIZER_FORMAT),
    }
    if not loading:
        state["progress"] = asdict(run.progress)
    return state


def _named_models(run: Run) -> dict[str, Any]:
    return {f"model{number}": model for number, model in enumerate(run.unwrapped_models)}


def _sharded_model(model: Any) -> dict[str, Any]:
    """The model's tensors, without Transformer Engine's `_extra_state`.

    Those are pickles, which a reader must not open, and hold nothing but the history of delayed FP8 scaling, which
    begins anew where a run goes on.
    """
    return {name: value for name, value in model.sharded_state_dict().items() if not name.endswith("_extra_state")}


def _load_model(model: Any, state: dict[str, Any]) -> None:
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    assert not missing and not unexpected, f"{missing=} {unexpected=}"


def _load_optimizer(run: Run, state: dict[str, Any]) -> None:
    """Restores moments, main weights and step counts; rates, betas and epsilon stay those of this start's settings."""
    wanted = [
        {key: group[key] for key in group if key not in ("params", "step")} for group in run.optimizer.param_groups
    ]
    with torch.no_grad():
        run.optimizer.load_state_dict(state)
    for group, settings in zip(run.optimizer.param_groups, wanted, strict=True):
        group.update(settings)


def _choose(load: Path) -> Path | None:
    """The newest whole checkpoint, the same on all ranks, None if there is none; says what is wrong with others.

    Collective: all ranks.
    """
    choice: list[Any] = [None]
    if is_rank_zero():
        try:
            choice[0], problems = find_good_checkpoint(load) if list_checkpoints(load) else (None, [])
            for problem in problems:
                print(f"warning: skipped a damaged checkpoint: {problem}", flush=True)
        except CheckpointError as error:
            choice[0] = error
    torch.distributed.broadcast_object_list(choice)  # collective: all ranks read the same one, or none does
    if isinstance(choice[0], CheckpointError):
        raise choice[0]
    return choice[0]


def _refuse_other_tokenizer(run: Run, folder: Path) -> None:
    """Equal sizes do not show it: the same ids would mean other words."""
    saved, now = load_tokenizer(folder / "tokenizer"), run.tokenizer
    if saved.fingerprint != now.fingerprint:
        raise CheckpointError(
            f"{folder} was trained with tokenizer {saved.fingerprint[:12]} ({saved.vocab_size:,} ids), but "
            f"--tokenizer-model is {now.fingerprint[:12]} ({now.vocab_size:,} ids); its embeddings mean nothing there. "
            f"Use {folder / 'tokenizer'} and a corpus written with it."
        )


def _refuse_ended_run(run: Run, iteration: int) -> None:
    config, train_iters = run.settings.checkpoint, run.settings.training.train_iters
    if iteration >= train_iters:
        raise ConfigError(
            f"--train-iters {train_iters} is not above {iteration}, the iteration of --continue-from "
            f"{config.continue_from}, from which this run counts on; add the iterations that it shall train."
        )


def _refuse_other_run(run: Run, saved: Settings, folder: Path, *, whole: bool) -> None:
    """Compares the settings; where the data starts anew, neither the data nor the seed of its order need match."""
    differences = []
    for section, names in _MUST_MATCH.items():
        if not whole and section in ("data", "training"):
            continue
        before, now = getattr(saved, section), getattr(run.settings, section)
        for name in names:
            if getattr(before, name) != getattr(now, name):
                flag = flag_of(_SET_BY.get(name, name))
                differences.append(f"{flag} was {getattr(before, name)} and is now {getattr(now, name)}")
    if differences:
        raise CheckpointError(
            f"{folder} belongs to another run: {'; '.join(differences)}. Start with the values in "
            f"{folder / 'settings.yaml'}."
        )
