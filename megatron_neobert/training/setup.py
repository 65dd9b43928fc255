"""Settings to objects: everything a run is made of, built in the order in which problems are cheapest to find."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.inputs import Inputs, open_phases
from megatron_neobert.data.batches.phases import TrainingStream, build_training_stream
from megatron_neobert.data.batches.stream import BatchStream
from megatron_neobert.model.kernels import choose_kernels
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.runtime import distributed
from megatron_neobert.runtime.megatron_patches import scale_by_tokens
from megatron_neobert.runtime.signals import remember_signals
from megatron_neobert.state import Run, TrainState
from megatron_neobert.training.optimizer import build_optimizer, build_scheduler


def join(settings: Settings) -> tuple[list[Inputs], torch.device]:
    """Open the data, whose errors all ranks find alike, then join the process group. Collective: all ranks."""
    inputs = open_phases(settings)
    device = distributed.initialize(settings)  # collective: all ranks
    remember_signals()  # from here on all ranks can agree on the iteration after which they stop
    return inputs, device


def build_run(settings: Settings, inputs: list[Inputs], device: torch.device) -> Run:
    """Build model, optimizer and schedule of a rank that has joined the others. Collective: all ranks."""
    training_stream, validation_streams = build_streams(settings, inputs)
    tokenizer = inputs[0].tokenizer
    model = build_model(settings, device, vocab_size=tokenizer.vocab_size)
    optimizer = build_optimizer(settings, model)
    return Run(
        settings=settings,
        device=device,
        tokenizer=tokenizer,
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(settings, optimizer),
        training_stream=training_stream,
        validation_streams=validation_streams,
        state=TrainState(corpus_sha256=inputs[0].identities[0]),
    )


def build_streams(settings: Settings, inputs: list[Inputs]) -> tuple[TrainingStream, dict[str, BatchStream]]:
    """Return this rank's batches for training and for each validation, all from their start.

    Validation keeps the settings and documents of the run's beginning in all phases: a curve is of one kind.
    """
    training = build_training_stream(settings, inputs, fixed_shapes=torch.cuda.is_available()).on_rank(
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )
    first = training.streams[0]
    validation = inputs[0].validation if settings.training.eval_iters else {}
    return training, {name: replace(first, sources=sources) for name, sources in validation.items()}


def build_model(settings: Settings, device: torch.device, *, vocab_size: int) -> DistributedDataParallel:
    """Build this rank's pipeline stage. Collective: all ranks."""
    model = NeoBERTModel(
        settings,
        vocab_size=vocab_size,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    wrapped = wrap_model(settings, model.to(device))
    wrapped.config.finalize_model_grads_func = scale_by_tokens
    if wrapped.ddp_config.overlap_grad_reduce:
        wrapped.config.no_sync_func = wrapped.no_sync
    return wrapped


def wrap_model(settings: Settings, model: Any) -> DistributedDataParallel:
    """Wrap a model in its precision and Megatron's data parallelism. Collective: the data-parallel group."""
    parallel, config = settings.parallel, model.config
    overlaps = torch.cuda.is_available() if parallel.overlap_grad_reduce is None else parallel.overlap_grad_reduce
    if settings.training.bf16:
        model = Float16Module(config, model)
    if choose_kernels(settings).transformer_impl == "transformer_engine":
        # Not by Megatron's option of that name: the decoder, a layer of Megatron's, would want Apex. And not before the
        # model has the gradients' memory, into which these layers add: what never trains has none.
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps and parallel.use_distributed_optimizer,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            bucket_size=parallel.ddp_bucket_size,
        ),
        model,
    )
