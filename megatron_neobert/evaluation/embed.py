"""Contrastive fine-tuning of any encoder, with the trainer and the losses of sentence-transformers.

The loss is InfoNCE over cosine similarities. Each query of a batch is compared with the positives and hard negatives of
all pairs of the batch. Pairs may have different numbers of negatives.

Checkpoints are in a folder named after a key of all settings and data, so the same command resumes a stopped run and
ends with the same weights. They are removed at the end. The final folder loads with `SentenceTransformer(folder)` and
has one prompt per dataset.
"""

import gc
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import msgspec
import torch
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)

from megatron_neobert.config.cli import find_config
from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.evaluation.data import digest_of, read_yaml
from megatron_neobert.evaluation.embed_data import (
    VALIDATION,
    ContrastiveConfig,
    DatasetSettings,
    PairCollator,
    PlannedBatchSampler,
    TrainingSettings,
    find_pairs,
    load_pairs,
    without_held_out,
)
from megatron_neobert.evaluation.ledger import describe_process, key_of, lock_results, write_record
from megatron_neobert.evaluation.models import choose_device, fingerprint, load_sentence_transformer
from megatron_neobert.evaluation.options import ComputeOptions, EmbedderOptions
from megatron_neobert.evaluation.report import load_record, write_page
from megatron_neobert.huggingface.folder_files import restore_files, write_module_files
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.runtime.atomic_files import saving_weights, temporary_path
from megatron_neobert.runtime.own_files import RECORD, claim_folder, create_folder, delete_folder, is_own_folder
from megatron_neobert.text import parse_json

_SCORE = f"eval_{VALIDATION}_cosine_ndcg@10"  # in the trainer's history


def run_contrastive(options: EmbedderOptions) -> None:
    """Fine-tune an encoder. Write OUTPUT/MODEL/MODEL-contrastive, and contrastive.json and .md next to that folder.

    A finished run is not repeated. Collective: all processes of a torchrun.

    Raises OutputError if the final folder exists, but was made with other settings or data.
    """
    config, model = ContrastiveConfig(), options.model
    if options.config is not None:
        path, remedy = find_config(options.config), "compare it with the recipe evaluation/contrastive"
        config = read_yaml("--config", path, ContrastiveConfig, remedy=remedy)
    changes = {name: value for name in ("steps", "batch_size") if (value := getattr(options, name)) is not None}
    training = msgspec.structs.replace(config.training, **changes)
    device, is_main = choose_device(options.device).type, os.environ.get("RANK", "0") == "0"
    # Refuses a folder that is not a model, before minutes of reading data.
    model_fingerprint = fingerprint(model)
    paths = find_pairs(options.data_dir, list(config.datasets))
    pairs = {key: load_pairs(path, limit=options.limit) for key, path in paths.items()}
    validation = pairs.pop(VALIDATION, None)
    if validation is not None:
        pairs = {key: without_held_out(dataset, validation, key) for key, dataset in pairs.items()}
    sources = {key: config.datasets.get(key, DatasetSettings()) for key in pairs}
    settings = {
        "model": model_fingerprint,
        **msgspec.structs.asdict(training),
        "seed": options.seed,
        "gradient_cache": options.gradient_cache,
        "autocast_bfloat16": (options.dtype or ("bfloat16" if device == "cuda" else "float32")) == "bfloat16",
        "device": device,
        "attention": options.attention,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "datasets": {key: msgspec.structs.asdict(source) for key, source in sources.items()},
        "rows": {key: len(dataset) for key, dataset in pairs.items()},
        "texts": {key: digest_of(dataset, ("query", "positive", "negatives")) for key, dataset in pairs.items()},
        "validation": validation and digest_of(validation, ("query", "positive", "negatives")),
    }
    folder = options.output / model_name(model)
    final, path = folder / f"{folder.name}-contrastive", folder / "contrastive.json"
    checkpoints = folder / "contrastive" / key_of(settings)
    with lock_results(folder / "contrastive") if is_main else nullcontext():
        record = load_record(path, "contrastive") if path.exists() else None
        if record and record.settings != msgspec.json.decode(msgspec.json.encode(settings)):
            record = None
        if record and final.exists() and fingerprint(final) == record.results["fingerprint"]:
            print(f"{final} already exists")
        # An interrupted run with these settings leaves its checkpoints, and a final folder with our record.
        elif final.exists() and not (checkpoints.exists() and is_own_folder(final)):
            raise OutputError(f"{final} was made with other settings or data; use those, or name another --output.")
        else:
            claim_folder(checkpoints)
            arguments = build_arguments(training, options, checkpoints, autocast=settings["autocast_bfloat16"])
            if validation is not None:
                arguments.eval_strategy, arguments.eval_steps = "steps", training.save_interval
            chosen = ContrastiveConfig(sources, training)
            with saving_weights(folder):
                results = train(chosen, pairs, options, arguments, final, validation=validation)
            if results is None:
                return
            origin = describe_process(device)
            write_record(
                path, folder=model, fingerprint=model_fingerprint, settings=settings, results=results, origin=origin
            )
        if is_main:
            (final / RECORD).unlink(missing_ok=True)
            write_page("contrastive", [path], folder)
            with suppress(OSError):
                delete_folder(checkpoints)


def build_arguments(
    training: TrainingSettings, options: EmbedderOptions, checkpoints: Path, *, autocast: bool
) -> SentenceTransformerTrainingArguments:
    """Return the arguments of sentence-transformers' trainer. Under torchrun, this also starts the process group.

    The trainer writes to `checkpoints` and, with `autocast`, computes in bfloat16. Raises ConfigError if this process
    sees several GPUs.
    """
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(checkpoints),
        max_steps=training.steps,
        # Before divisors: PlannedBatchSampler yields the batch size of each dataset.
        per_device_train_batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(training.warmup_ratio * training.steps),
        weight_decay=training.weight_decay,
        max_grad_norm=training.clip_grad,
        bf16=autocast,
        use_cpu=options.device == "cpu",
        logging_steps=min(training.log_interval, training.steps),
        save_steps=training.save_interval,
        save_total_limit=2,
        # The plan has a batch for every process in every step, so nothing is dropped.
        dataloader_drop_last=True,
        seed=options.seed,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
    )
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"{arguments.n_gpu} GPUs are visible to one process, which would split every batch over them. Use torchrun "
            f"--nproc-per-node {arguments.n_gpu}, or set CUDA_VISIBLE_DEVICES=0 for a single GPU."
        )
    return arguments


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the subfolder `checkpoint-*` with the most steps among complete checkpoints, or None if there is none.

    A checkpoint is complete if its `trainer_state.json` is readable, because the trainer writes this file last.
    """
    by_step = dict[int, Path]()
    for path in folder.glob("checkpoint-*/trainer_state.json"):
        with suppress(ValueError):
            by_step[parse_json(path.read_text(encoding="utf-8"))["global_step"]] = path.parent
    return by_step[max(by_step)] if by_step else None


class _Trainer(SentenceTransformerTrainer):
    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Disable the model card, which would contain texts of the datasets and local paths."""


def build_prompts(sources: Mapping[str, DatasetSettings], training: TrainingSettings) -> dict[str, dict[str, str]]:
    """Return {dataset: {column: prompt}}. The result is empty for `instructions: none`.

    A prompt is the dataset's instruction followed by the separator; for an empty instruction, the prompt is empty.
    """
    columns = {"none": (), "query": ("query",), "both": ("query", "document")}[training.instructions]
    instructions = {key: source.instruction for key, source in sources.items()}
    prompts = {key: text + training.separator if text.strip() else "" for key, text in instructions.items()}
    return {key: dict.fromkeys(columns, prompt) for key, prompt in prompts.items() if columns}


def build_loss(
    model: SentenceTransformer, temperature: float, gradient_cache: int | None, *, dimensions: Sequence[int] = ()
) -> torch.nn.Module:
    """Return the InfoNCE loss. With `gradient_cache`, the loss computes that many texts at a time.

    With `dimensions`, the loss is summed over full embeddings and embeddings cut to each of these sizes (Matryoshka,
    arXiv 2205.13147). Raises ConfigError if a size is larger than the embeddings.
    """
    loss: torch.nn.Module = MultipleNegativesRankingLoss(model, scale=1 / temperature)
    if gradient_cache is not None:
        loss = CachedMultipleNegativesRankingLoss(model, scale=1 / temperature, mini_batch_size=gradient_cache)
    if not dimensions:
        return loss
    largest: Any = model.get_embedding_dimension()
    if max(dimensions) > largest:
        raise ConfigError(f"matryoshka {max(dimensions)}: the model's embeddings have {largest}; name smaller ones.")
    return MatryoshkaLoss(model, loss, sorted({largest, *dimensions}, reverse=True))


def build_evaluator(pairs: datasets.Dataset, prompts: Mapping[str, str]) -> InformationRetrievalEvaluator:
    """Return an evaluator that searches each query's positive among all positives and negatives in `pairs`."""
    rows = pairs.to_list()
    documents = dict.fromkeys(text for row in rows for text in (row["positive"], *row["negatives"]))
    relevant: dict[str, set[str]] = {}
    for row in rows:
        relevant.setdefault(row["query"], set()).add(row["positive"])
    return InformationRetrievalEvaluator(
        {query: query for query in relevant},
        {document: document for document in documents},
        relevant,
        name=VALIDATION,
        write_csv=False,
        query_prompt=prompts.get("query"),
        corpus_prompt=prompts.get("document"),
    )


def train(
    config: ContrastiveConfig,
    pairs: Mapping[str, datasets.Dataset],
    options: EmbedderOptions,
    arguments: SentenceTransformerTrainingArguments,
    final: Path,
    *,
    validation: datasets.Dataset | None = None,
) -> dict[str, Any] | None:
    """Train, or resume from the newest checkpoint in `arguments.output_dir`. Rank 0 then writes the folder `final`.

    Rank 0 returns the results for the JSON record, with losses in nats; other ranks return None. If `validation` is
    given, nDCG@10 on these pairs is measured whenever a checkpoint is saved.

    An existing folder `final` is replaced. The call sets the batch sampler and the prompts of `arguments`, and ends the
    process group. Collective: all processes of a torchrun.
    """
    training = config.training
    # Set the seed before loading, because a pooler that the folder lacks is initialized at random.
    transformers.set_seed(options.seed)
    # Weights are float32 whatever the folder's dtype is: AdamW's updates are too small for bfloat16's precision.
    loading = ComputeOptions(device="cpu", attention=options.attention)
    model = load_sentence_transformer(options.model, loading, max_length=training.max_length)
    prompts = build_prompts(config.datasets, training)
    # encode_query and encode_document of the final model use the prompts of the largest dataset.
    default_prompts = prompts.get(max(pairs, key=lambda key: len(pairs[key])), {})
    query_prompts = {key: columns["query"] for key, columns in prompts.items()}
    model.prompts = {**model.prompts, **default_prompts, **query_prompts}
    arguments.multi_dataset_batch_sampler = partial(
        PlannedBatchSampler,
        batch_sizes={key: config.datasets[key].batch_size(training.batch_size) for key in pairs},
        alpha=training.alpha,
        batches=training.steps * arguments.world_size,
    )
    arguments.prompts = prompts
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=datasets.DatasetDict(pairs),
        loss=build_loss(model, training.temperature, options.gradient_cache, dimensions=training.matryoshka),
        evaluator=None if validation is None else build_evaluator(validation, default_prompts),
        data_collator=PairCollator(preprocess_fn=model.preprocess, prompts=prompts),
    )
    start, checkpoint = time.monotonic(), newest_checkpoint(Path(str(arguments.output_dir)))
    if checkpoint is not None and trainer.is_world_process_zero():
        print(f"resuming from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds, is_main, history = time.monotonic() - start, trainer.is_world_process_zero(), trainer.state.log_history
    # DDP must not have the last reference to the process group: torch then joins the group's threads with Python's
    # lock held, and hangs if one of them needs the lock.
    del trainer
    gc.collect()
    if torch.distributed.is_initialized():
        # A process that exits while threads of gloo run may end with SIGABRT. torchrun would then end rank 0, which
        # still has to write the final folder.
        torch.distributed.destroy_process_group()
    if not is_main:
        return None
    # The history is part of the checkpoints, so a resumed run has every step once. A loss is the mean since the
    # previous entry, or since the checkpoint if the run was resumed within a log interval.
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    scores = [(entry["step"], entry[_SCORE]) for entry in history if _SCORE in entry]
    save_final(model, options.model, final)
    first_loss, last_loss = losses[0][1], losses[-1][1]
    print(f"loss {first_loss:.3f} -> {last_loss:.3f} nats in {seconds:.0f} s; wrote {final}")
    return {
        "folder": str(final),
        "fingerprint": fingerprint(final),
        "first_loss_nats": first_loss,
        "last_loss_nats": last_loss,
        "losses_nats": losses,
        "validation_ndcg@10": scores,
        "seconds_of_this_start": round(seconds, 1),
    }


def save_final(model: SentenceTransformer, source: Path, final: Path) -> None:
    """Write the model to the folder `final`, whole or not at all. A record file lets a later call replace the folder.

    The tokenizer files are copied from `source`, the folder before fine-tuning.
    """
    temporary = temporary_path(final)
    create_folder(temporary)
    model.save_pretrained(str(temporary), create_model_card=False)
    restore_files(temporary, source)
    pooling: Any = model[1]
    write_module_files(
        temporary,
        max_seq_length=int(model.max_seq_length or model.tokenizer.model_max_length),
        pooling=pooling.get_config_dict(),
        more_modules=[type(module).__name__ for module in list(model)[2:]],
        prompts={name: prompt or "" for name, prompt in model.prompts.items()},
    )
    delete_folder(final)
    temporary.replace(final)
