"""Whether a checkpoint and the settings of a start belong together. Needs no torch.

Three kinds of settings: with other values of the first the weights or the optimizer's state do not fit; with other
values of the second they fit, but the run silently becomes another one, so it takes --allow-changed; all others (rates,
length, precision, layout of the ranks, kernels) may change, and what has changed is logged.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_neobert.config.schema import Settings, flag_of
from megatron_neobert.errors import CheckpointError

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
    ),
    # The optimizer's state is laid out by these.
    "parallel": ("use_distributed_optimizer",),
    "optimizer": ("weight_decay_scope",),
}

_MUST_BE_ALLOWED = {
    "model": ("rotary_base", "norm_epsilon"),
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
    "check_weight_hash_across_dp_replicas_interval",
    "distributed_timeout_minutes",
    "num_workers",
    "probe_data_path",
    "object_storage_cache_path",
    "object_storage_cache_gb",
    "dataloader_type",
}

# What --allow-changed can name.
ALLOWABLE = sorted(
    ["micro_batch_size", *(_SET_BY.get(name, name) for names in _MUST_BE_ALLOWED.values() for name in names)]
)


def refuse_other_run(
    saved: Settings, now: Settings, folder: Path, *, has_new_data: bool, weights_only: bool = False
) -> None:
    """Compares a checkpoint's settings with those of this start.

    Args:
        has_new_data: Whether the data starts anew; then neither they nor their order need match.
        weights_only: Whether the checkpoint has no optimizer state; then only the model need match.

    Raises:
        CheckpointError: Naming every setting that must not differ, with both values.
    """
    allowed = now.checkpoint.changes_allowed
    without = {"parallel", "data", "optimizer", "training"} if weights_only else set()
    must_be_allowed = _MUST_BE_ALLOWED
    if now.training.loss_normalization == "micro_batch":  # a batch is then cut into means, not only into shares
        training = (*must_be_allowed["training"], "micro_batch_size")
        must_be_allowed = {**must_be_allowed, "training": training}
    must_fit = _MUST_FIT
    if not now.parallel.use_distributed_optimizer:  # the whole one keeps main weights in bfloat16 runs only
        must_fit = {**must_fit, "training": ("bf16",)}
    if "muon" in (saved.optimizer.optimizer, now.optimizer.optimizer):  # its state holds no second moments
        must_fit = {**must_fit, "optimizer": (*_MUST_FIT["optimizer"], "optimizer")}
    fixed = dict(_differences(saved, now, {name: names for name, names in must_fit.items() if name not in without}))
    without |= {"data", "training"} if has_new_data else set()
    guarded = {
        name: text
        for section, names in must_be_allowed.items()
        if section not in without
        for name, text in _differences(saved, now, {section: names})
        if name not in allowed and name not in fixed
    }
    if not fixed and not guarded:
        return
    texts = [*fixed.values(), *guarded.values()]
    remedy = f"Start with the values in {folder / 'settings.yaml'}"
    if not fixed:
        remedy += f", or, to continue as another run, add --allow-changed {','.join(guarded)}"
    raise CheckpointError(f"{folder} belongs to another run: {'; '.join(texts)}. {remedy}.")


def changes(saved: Settings, now: Settings, *, weights_only: bool = False) -> Iterator[str]:
    """Every setting that differs and may matter, in words; of the model alone where nothing else was saved."""
    logged = {"model"} if weights_only else set(vars(now)) - _NOT_LOGGED
    sections = {name: tuple(vars(getattr(now, name))) for name in vars(now) if name in logged}
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
