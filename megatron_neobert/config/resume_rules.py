"""Checks that a checkpoint and the settings of a start belong to the same run. Needs no torch.

Three kinds of settings: with other values of the first the weights or the optimizer's state do not fit; with other
values of the second they fit, but the run becomes another one, so it takes --continue-from and a folder of its own; all
others (rates, length, precision, layout of the ranks, kernels) may change, and what has changed is logged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_neobert.cli import flag_of
from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import CheckpointError, ConfigError

_MUST_FIT = {
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
    # The optimizer's state is laid out by these.
    "parallel": ("use_distributed_optimizer",),
    "optimizer": ("weight_decay_scope",),
}

_SAME_RUN = {
    "data": (
        "seq_length",
        "long_documents",
        "batch_layout",
        "document_block_size",
        "share_of_data_path",
        "mask_prob",
        "mask_replacement",
    ),
    "optimizer": ("optimizer",),
    "training": ("seed", "global_batch_size", "loss_normalization"),
}

# Where a property stands for the setting that the user knows.
_SET_BY = {
    "ffn_width": "ffn_hidden_size",
    "share_of_data_path": "split",
    "position_rows": "max_position_embeddings",
}

# Of no consequence for the weights: sections, and settings of others.
_NOT_LOGGED = {
    "checkpoint",
    "logging",
    "exit_interval",
    "exit_duration_in_mins",
    "distributed_timeout_minutes",
    "num_workers",
    "object_storage_cache_path",
    "dataloader_type",
}

_AS_ANOTHER_RUN = "to continue as another run, give it as --continue-from and other folders as --save and --load"


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """Facts that a checkpoint records about the run that wrote it."""

    folder: Path
    settings: Settings
    iteration: int
    data_identity: str  # hash of the documents that the run read
    weights_only: bool  # has no optimizer state, because a conversion wrote the checkpoint


def refuse_unfit_checkpoint(saved: SavedRun, now: Settings, identities: Sequence[str], *, has_new_data: bool) -> None:
    """Compare a checkpoint with the settings and data of a start, at the iteration of the checkpoint.

    Args:
        identities: Hashes of the start's data, as this version and earlier ones compute them.
        has_new_data: The checkpoint is that of --continue-from, so the data may begin anew.
    """
    folder, iteration = saved.folder, saved.iteration
    then, own = phase_at(saved.settings, iteration).settings, phase_at(now, iteration).settings
    refuse_other_run(then, own, folder, has_new_data=has_new_data, weights_only=saved.weights_only)
    if saved.weights_only and not has_new_data:
        raise CheckpointError(
            f"{folder} holds weights but no optimizer state and no place in any data, as a conversion writes it; give "
            "it as --continue-from and other folders as --save and --load."
        )
    continued = f"--continue-from {now.checkpoint.continue_from}"
    if has_new_data and iteration >= now.training.train_iters:
        raise ConfigError(
            f"--train-iters {now.training.train_iters} is not above {iteration}, the iteration of {continued}, from "
            "which this run counts on; add the iterations that it shall train."
        )
    begins_anew = saved.data_identity not in identities
    if begins_anew and not has_new_data:
        raise CheckpointError(
            f"{folder} was trained on the corpus with sha256 {saved.data_identity[:12]}, --data-path "
            f"{' '.join(own.data.data_path)} has {identities[0][:12]}; its place in the data means nothing there. Name "
            f"the corpus, min, max, where and drop that it was trained on; or, {_AS_ANOTHER_RUN}."
        )
    if not has_new_data:
        _refuse_changed_past(saved, now)
    elif iteration and then.training.seed == own.training.seed:
        begins_anew = begins_anew or any(
            getattr(then.data, name) != getattr(own.data, name)
            for name in ("share_of_data_path", "document_block_size")
        )
        common = _corpora(then) & _corpora(own)
        if begins_anew and common:
            raise ConfigError(
                f"{continued}: the data begin anew, and with its --seed {own.training.seed} the batches of "
                f"{min(common)} would come again; add --seed {own.training.seed + 1}."
            )


def _corpora(settings: Settings) -> set[str]:
    return {component.prefix for component in parse_data_path(settings.data.data_path)}


def _refuse_changed_past(saved: SavedRun, now: Settings) -> None:
    """Raise CheckpointError if a phase that began before the checkpoint has changed. Its corpora may have moved."""

    def past(settings: Settings) -> list[tuple[int, dict[str, Any]]]:
        begun = [phase for phase in settings.training.phases if phase.after_iters < saved.iteration]
        return [(phase.after_iters, {**phase.values, "data_path": phase.data_path is not None}) for phase in begun]

    if past(saved.settings) != past(now):
        raise CheckpointError(
            f"{saved.folder} belongs to another run: a phase that began before iteration {saved.iteration} is not what "
            f"it was. Start with the phases in {saved.folder / 'settings.yaml'}, or, {_AS_ANOTHER_RUN}."
        )


def refuse_other_run(
    saved: Settings, now: Settings, folder: Path, *, has_new_data: bool, weights_only: bool = False
) -> None:
    """Raise CheckpointError with every setting that must not differ between a checkpoint and this start.

    Args:
        has_new_data: The run continues another one; only weights and optimizer state need fit.
        weights_only: The checkpoint has no optimizer state; only the model need fit.
    """
    must_fit = {"model": _MUST_FIT["model"]} if weights_only else dict(_MUST_FIT)
    if not weights_only and not now.parallel.use_distributed_optimizer:  # keeps main weights in bfloat16 runs only
        must_fit["training"] = ("bf16",)
    if not weights_only and "muon" in (saved.optimizer.optimizer, now.optimizer.optimizer):  # has no second moments
        must_fit["optimizer"] = (*_MUST_FIT["optimizer"], "optimizer")
    unfit = dict(_differences(saved, now, must_fit))
    same_run = {} if has_new_data or weights_only else dict(_SAME_RUN)
    if same_run and now.training.loss_normalization == "micro_batch":  # a batch is then cut into means, not only shares
        same_run["training"] = (*_SAME_RUN["training"], "micro_batch_size")
    changed = {name: text for name, text in _differences(saved, now, same_run) if name not in unfit}
    if unfit or changed:
        remedy = "" if unfit else f", or, {_AS_ANOTHER_RUN}"
        raise CheckpointError(
            f"{folder} belongs to another run: {'; '.join([*unfit.values(), *changed.values()])}. Start with the "
            f"values in {folder / 'settings.yaml'}{remedy}."
        )


def changes(saved: Settings, now: Settings, *, weights_only: bool = False) -> Iterator[str]:
    """Every setting that differs and may matter, in words; of the model alone where nothing else was saved."""
    logged = {"model"} if weights_only else set(vars(now)) - _NOT_LOGGED
    sections = {name: tuple(vars(getattr(now, name))) for name in vars(now) if name in logged}
    # Not the setting, which may be the default on one side and the same number on the other.
    sections["model"] = tuple("ffn_width" if name == "ffn_hidden_size" else name for name in sections["model"])
    for name, text in _differences(saved, now, sections):
        if name not in _NOT_LOGGED:
            yield text


def _differences(saved: Settings, now: Settings, sections: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    for section, names in sections.items():
        before, after = getattr(saved, section), getattr(now, section)
        for name in names:
            if getattr(before, name) != getattr(after, name):
                known = _SET_BY.get(name, name)
                yield known, f"{flag_of(known)} was {getattr(before, name)} and is now {getattr(after, name)}"
