"""Rules for resuming: which settings may differ between a checkpoint and the run that starts from it. Needs no torch.

There are three kinds of settings. All settings of the model except `_MODEL_MAY_CHANGE` must fit: with other values the
weights cannot be loaded, or mean another function. `_SAME_RUN`: other values need --continue-from and new folders,
because the result is another run. All other settings (rates, length, precision, layout of the ranks, kernels) may
change, and the log lists the changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_neobert.cli import flag_of
from megatron_neobert.config.phases import order_settings, phase_at, phases_until, resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import CheckpointError, ConfigError

# Learned positions have max_position_embeddings in their shape, which `position_rows` compares.
_MODEL_MAY_CHANGE = ("max_position_embeddings", "init_method_range")

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


class ReadCorpus(NamedTuple):
    """A corpus used for training. Documents and seed determine its batches; --split excludes validation documents."""

    documents_sha256: str
    seed: int
    split: str


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A checkpoint, and its records of the run that wrote it; see TrainState for the hashes."""

    folder: Path
    settings: Settings
    iteration: int
    corpus_sha256: str
    first_corpus_sha256: str
    read_corpora: Sequence[ReadCorpus]
    weights_only: bool  # True if a conversion wrote the checkpoint, without optimizer state


def refuse_unfit_checkpoint(
    saved: SavedRun,
    now: Settings,
    hashes: Sequence[str],
    corpora: Sequence[Mapping[str, str]],
    *,
    has_new_data: bool,
) -> None:
    """Raise an error if a run with these settings and data cannot start from a checkpoint.

    Args:
        now: Settings of the run that starts.
        hashes: Hash of each phase's data, see TrainState.corpus_sha256.
        corpora: For each phase, hash of the documents -> prefix of the corpus.
        has_new_data: The checkpoint comes from --continue-from, so this run's data may differ.

    Raises:
        CheckpointError: The checkpoint belongs to a different run, or contains no optimizer state although
            `has_new_data` is False.
    """
    folder, iteration = saved.folder, saved.iteration
    saved_phase, new_phase = phase_at(saved.settings, iteration), phase_at(now, iteration)
    refuse_other_run(
        saved_phase.settings, new_phase.settings, folder, has_new_data=has_new_data, weights_only=saved.weights_only
    )
    if saved.weights_only and not has_new_data:
        raise CheckpointError(
            f"{folder} was written by a conversion and has no optimizer state and no position in the data; give it as "
            "--continue-from and new folders as --save and --load."
        )
    if has_new_data:
        _refuse_repeated_batches(saved, now, hashes, corpora)
        return
    old, new = phases_until(saved.settings, iteration), phases_until(now, iteration)
    if [phase.first for phase in old] != [phase.first for phase in new]:
        raise CheckpointError(
            f"{folder} belongs to another run: a phase before iteration {iteration} has changed. "
            f"Start with the phases in {folder / 'settings.yaml'}, or, {_AS_NEW_RUN}."
        )
    # Validation uses the settings and documents of the first phase in all phases. Paths of corpora may change.
    for old_phase, now_phase in zip(old, new, strict=True):
        refuse_other_run(old_phase.settings, now_phase.settings, folder, has_new_data=False)
    for recorded, phase in ((saved.corpus_sha256, new_phase), (saved.first_corpus_sha256, resolve_phases(now)[0])):
        if recorded != hashes[phase.number]:
            raise CheckpointError(
                f"{folder} was trained on the corpus with sha256 {recorded[:12]}, but --data-path "
                f"{' '.join(phase.settings.data.data_path)} has {hashes[phase.number][:12]}. Give the corpus, "
                f"min, max, where and drop of that run; or, {_AS_NEW_RUN}."
            )


def _refuse_repeated_batches(
    saved: SavedRun, now: Settings, hashes: Sequence[str], corpora: Sequence[Mapping[str, str]]
) -> None:
    """Raise ConfigError if a run with --continue-from has no iteration left, or would repeat the saved run's batches.

    Documents and seed determine a corpus's order and masks. So a corpus that the saved run has read with the same seed
    is refused, unless this run continues at the saved run's position.
    """
    source, iteration = f"--continue-from {now.checkpoint.continue_from}", saved.iteration
    if iteration >= now.training.train_iters:
        raise ConfigError(
            f"--train-iters {now.training.train_iters} is not above {iteration}, the iteration of {source}, from which "
            "this run continues counting; raise it by the iterations that you want to train."
        )
    old, new = phase_at(saved.settings, iteration).settings, phase_at(now, iteration)
    continues = saved.corpus_sha256 == hashes[new.number] and order_settings(old) == order_settings(new.settings)
    read = {(each.documents_sha256, each.seed) for each in saved.read_corpora}
    for phase in resolve_phases(now)[new.number :]:
        seed = phase.settings.training.seed
        if continues and seed == new.settings.training.seed:  # another seed follows from another --data-path
            continue
        for sha256, prefix in corpora[phase.number].items():
            if (sha256, seed) in read:
                raise ConfigError(
                    f"{source}: the data start from the beginning, and --seed {seed} would repeat the batches of "
                    f"{prefix}; add --seed {max(number for _, number in read) + 1}."
                )


def continue_warnings(saved: SavedRun, now: Settings, corpora: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings if, after the checkpoint, the learning rate jumps or validation may use trained documents.

    `corpora` maps the hash of the documents of each corpus of the first phase to the corpus's prefix.
    """

    def decay_start(settings: Settings) -> int | None:
        decay = settings.optimizer.lr_wsd_decay_iters
        return None if decay is None else settings.lr_decay_end - decay

    start, split = decay_start(now), now.data.share_of_data_path
    if start is not None and start < saved.iteration and start != decay_start(saved.settings):
        yield (
            f"the learning rate jumps, because the decay of --lr-wsd-decay-iters begins after iteration {start}, and "
            f"{saved.folder} has {saved.iteration}; raise --train-iters by {saved.iteration - start}"
        )
    for each in saved.read_corpora:
        if now.training.eval_iters and each.split != split != "100" and each.documents_sha256 in corpora:
            yield (
                f"--split {split} validates on documents of {corpora[each.documents_sha256]} that may have been "
                f"trained on, with --split {each.split}; use --split {each.split}, or --valid-data-path"
            )
            break


def refuse_other_run(
    saved: Settings, now: Settings, folder: Path, *, has_new_data: bool, weights_only: bool = False
) -> None:
    """Raise CheckpointError if fixed settings differ from the checkpoint's. The message lists all differences.

    Args:
        has_new_data: The checkpoint comes from --continue-from, so only weights and optimizer state must fit.
        weights_only: The checkpoint contains no optimizer state, so only the model must fit.
    """
    fixed = [name for name in _model_settings(saved) if name not in _MODEL_MAY_CHANGE]
    must_fit: dict[str, tuple[str, ...]] = {"model": (*fixed, "position_rows")}
    if not weights_only and "muon" in (saved.optimizer.optimizer, now.optimizer.optimizer):
        must_fit["optimizer"] = ("optimizer",)  # Muon has no second moments
    unfit = dict(_differences(saved, now, must_fit))
    same_run = {} if has_new_data or weights_only else dict(_SAME_RUN)
    if same_run and now.training.loss_normalization == "micro_batch":
        # The loss is then a mean of the micro-batches' means, so their size changes it.
        same_run["training"] = (*_SAME_RUN["training"], "micro_batch_size")
    changed = {name: text for name, text in _differences(saved, now, same_run) if name not in unfit}
    if unfit or changed:
        remedy = f", or, {_AS_NEW_RUN}"
        if unfit:
            remedy = "" if has_new_data else ", or train from the beginning with new folders as --save and --load"
        raise CheckpointError(
            f"{folder} belongs to another run: {'; '.join([*unfit.values(), *changed.values()])}. Start with the "
            f"values in {folder / 'settings.yaml'}{remedy}."
        )


def changes(saved: Settings, now: Settings, *, weights_only: bool = False) -> Iterator[str]:
    """Yield a phrase such as `--lr was 0.1 and is now 0.2` for each changed setting that may affect the weights.

    If `weights_only`, the checkpoint contains no optimizer state, and only the model is compared.
    """
    logged = {"model"} if weights_only else set(vars(now)) - _NOT_LOGGED
    sections = {name: tuple(vars(getattr(now, name))) for name in vars(now) if name in logged}
    sections["model"] = _model_settings(saved)
    for name, text in _differences(saved, now, sections):
        if name not in _NOT_LOGGED:
            yield text


def _model_settings(settings: Settings) -> tuple[str, ...]:
    """Return the names of all model settings to compare. `ffn_width` replaces `ffn_hidden_size`."""
    # The width and not the setting: None and the same number given explicitly are equal.
    return tuple("ffn_width" if name == "ffn_hidden_size" else name for name in vars(settings.model))


def _differences(saved: Settings, now: Settings, sections: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield (name, phrase with both values) for each setting that differs. `sections` lists the names to compare."""
    for section, names in sections.items():
        for name in names:
            old, new = (getattr(getattr(settings, section), name) for settings in (saved, now))
            if old != new:
                setting = _SETTING_OF.get(name, name)
                yield setting, f"{flag_of(setting)} was {old} and is now {new}"
