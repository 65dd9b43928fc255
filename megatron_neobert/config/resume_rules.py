"""Rules for resuming: which settings may differ between a checkpoint and the run that starts from it. Needs no torch.

There are three kinds of settings. `_MUST_FIT`: with other values the weights or the optimizer state cannot be loaded.
`_SAME_RUN`: other values need --continue-from and new folders, because the result is another run. All other settings
(rates, length, precision, layout of the ranks, kernels) may change, and the log lists the changes.
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
}

_SAME_RUN = {
    "data": (
        "seq_length",
        "long_documents",
        "batch_layout",
        "document_block_size",
        "share_of_data_path",
        "objective",
        "mask_prob",
        "mask_replacement",
    ),
    "optimizer": ("optimizer",),
    "training": ("seed", "global_batch_size", "loss_normalization"),
}

# Property -> setting that the user can change.
_SETTING_OF = {
    "ffn_width": "ffn_hidden_size",
    "share_of_data_path": "split",
    "position_rows": "max_position_embeddings",
}

# Sections, and settings of other sections, that do not affect the weights.
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

_AS_NEW_RUN = "to start a new run from it, give it as --continue-from and new folders as --save and --load"


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint, and what it records about the run that wrote it."""

    folder: Path
    settings: Settings
    iteration: int
    data_identity: str  # hash of the documents that the run read
    weights_only: bool  # True if a conversion wrote the checkpoint, without optimizer state


def refuse_unfit_checkpoint(saved: SavedRun, now: Settings, identities: Sequence[str], *, has_new_data: bool) -> None:
    """Raise if a run with these settings and data cannot start from a checkpoint.

    Args:
        now: Settings of the run that starts.
        identities: Hashes of the run's data at the checkpoint's iteration, as this and earlier versions compute them.
        has_new_data: The checkpoint is of the run in --continue-from, so this run may have other data.

    Raises:
        CheckpointError: The checkpoint belongs to another run, or has no optimizer state and `has_new_data` is False.
        ConfigError: --train-iters or --seed do not fit the run of --continue-from.
    """
    folder, iteration = saved.folder, saved.iteration
    saved_phase, new_phase = phase_at(saved.settings, iteration).settings, phase_at(now, iteration).settings
    refuse_other_run(saved_phase, new_phase, folder, has_new_data=has_new_data, weights_only=saved.weights_only)
    if saved.weights_only and not has_new_data:
        raise CheckpointError(
            f"{folder} was written by a conversion and has no optimizer state and no position in the data; give it as "
            "--continue-from and new folders as --save and --load."
        )
    source = f"--continue-from {now.checkpoint.continue_from}"
    if has_new_data and iteration >= now.training.train_iters:
        raise ConfigError(
            f"--train-iters {now.training.train_iters} is not above {iteration}, the iteration of {source}, from which "
            "this run continues counting; raise it by the iterations that you want to train."
        )
    has_other_data = saved.data_identity not in identities
    if has_other_data and not has_new_data:
        raise CheckpointError(
            f"{folder} was trained on the corpus with sha256 {saved.data_identity[:12]}, but --data-path "
            f"{' '.join(new_phase.data.data_path)} has {identities[0][:12]}. Give the corpus, min, max, where and drop "
            f"of that run; or, {_AS_NEW_RUN}."
        )
    if not has_new_data:
        _refuse_changed_past(saved, now)
    elif iteration and saved_phase.training.seed == new_phase.training.seed:
        starts_over = has_other_data or any(
            getattr(saved_phase.data, name) != getattr(new_phase.data, name)
            for name in ("share_of_data_path", "document_block_size")
        )
        common = _corpora(saved_phase) & _corpora(new_phase)
        if starts_over and common:
            raise ConfigError(
                f"{source}: the data start from the beginning, and --seed {new_phase.training.seed} would repeat the "
                f"batches of {min(common)}; add --seed {new_phase.training.seed + 1}."
            )


def _corpora(settings: Settings) -> set[str]:
    return {component.prefix for component in parse_data_path(settings.data.data_path)}


def _refuse_changed_past(saved: SavedRun, now: Settings) -> None:
    """Raise CheckpointError if `now` changes a phase that began before the checkpoint. Paths of corpora may change."""

    def begun_phases(settings: Settings) -> list[tuple[int, dict[str, Any]]]:
        begun = [phase for phase in settings.training.phases if phase.after_iters < saved.iteration]
        return [(phase.after_iters, {**phase.values, "data_path": phase.data_path is not None}) for phase in begun]

    if begun_phases(saved.settings) != begun_phases(now):
        raise CheckpointError(
            f"{saved.folder} belongs to another run: a phase before iteration {saved.iteration} has changed. "
            f"Start with the phases in {saved.folder / 'settings.yaml'}, or, {_AS_NEW_RUN}."
        )


def refuse_other_run(
    saved: Settings, now: Settings, folder: Path, *, has_new_data: bool, weights_only: bool = False
) -> None:
    """Raise CheckpointError if a setting that must not change differs from the checkpoint. The message lists them all.

    Args:
        has_new_data: The checkpoint is of the run in --continue-from, so only weights and optimizer state must fit.
        weights_only: The checkpoint has no optimizer state, so only the model must fit.
    """
    must_fit: dict[str, tuple[str, ...]] = dict(_MUST_FIT)
    if not weights_only and "muon" in (saved.optimizer.optimizer, now.optimizer.optimizer):
        must_fit["optimizer"] = ("optimizer",)  # Muon has no second moments
    unfit = dict(_differences(saved, now, must_fit))
    same_run = {} if has_new_data or weights_only else dict(_SAME_RUN)
    if same_run and now.training.loss_normalization == "micro_batch":
        # The loss is then a mean of the micro-batches' means, so their size changes it.
        same_run["training"] = (*_SAME_RUN["training"], "micro_batch_size")
    changed = {name: text for name, text in _differences(saved, now, same_run) if name not in unfit}
    if unfit or changed:
        remedy = "" if unfit else f", or, {_AS_NEW_RUN}"
        raise CheckpointError(
            f"{folder} belongs to another run: {'; '.join([*unfit.values(), *changed.values()])}. Start with the "
            f"values in {folder / 'settings.yaml'}{remedy}."
        )


def changes(saved: Settings, now: Settings, *, weights_only: bool = False) -> Iterator[str]:
    """Yield a phrase such as `--lr was 0.1 and is now 0.2` for each changed setting that may affect the weights.

    Args:
        weights_only: The checkpoint has no optimizer state, so only the model is compared.
    """
    logged = {"model"} if weights_only else set(vars(now)) - _NOT_LOGGED
    sections = {name: tuple(vars(getattr(now, name))) for name in vars(now) if name in logged}
    # The width and not the setting: None and the same number given explicitly are equal.
    sections["model"] = tuple("ffn_width" if name == "ffn_hidden_size" else name for name in sections["model"])
    for name, text in _differences(saved, now, sections):
        if name not in _NOT_LOGGED:
            yield text


def _differences(saved: Settings, now: Settings, sections: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield (name, phrase with both values) of each setting that differs. `sections` has the names to compare."""
    for section, names in sections.items():
        for name in names:
            old, new = (getattr(getattr(settings, section), name) for settings in (saved, now))
            if old != new:
                setting = _SETTING_OF.get(name, name)
                yield setting, f"{flag_of(setting)} was {old} and is now {new}"
