"""Construction of a run from its settings: data, process group, model, optimizer, scheduler."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from megatron_neobert.checkpoint.train_state import TrainState
from megatron_neobert.config.rules import graph_obstacle
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.batch import RankPosition, build_stream
from megatron_neobert.data.batches.corpora import OpenedCorpora, open_phases
from megatron_neobert.model.kernels import choose_kernels
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.runtime import distributed
from megatron_neobert.runtime.megatron_patches import finalize_gradients
from megatron_neobert.runtime.signals import finish_iteration_at_signals
from megatron_neobert.state import Run
from megatron_neobert.training.cuda_graph import GraphedSchedule
from megatron_neobert.training.optimizer import build_optimizer, build_scheduler


def join(settings: Settings) -> tuple[list[OpenedCorpora], torch.device]:
    """Open the data, join the process group, and return the data of each phase and the device of this rank.

    After this call, a stop signal ends the run only after the current iteration.

    Collective: all ranks.
    """
    # First, because errors in the data are the same on all ranks, and found without waiting for the other ranks.
    opened = open_phases(settings)
    held_out = (source for sources in opened[0].validation.values() for source in sources)
    contents = {
        "sha256 of --data-path": [phase.sha256 for phase in opened],
        "sha256 of validation data": [source.corpus.manifest.documents_sha256 for source in held_out],
    }
    device = distributed.initialize(settings, contents=contents)
    finish_iteration_at_signals()
    return opened, device


def build_run(
    settings: Settings, opened: list[OpenedCorpora], device: torch.device, *, draws_weights: bool = True
) -> Run:
    """Build this rank's run from the results of `join`, at iteration 0; see NeoBERTModel. Collective: all ranks."""
    rank = RankPosition(
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )
    training_stream = replace(build_stream(settings, opened, pads_to_capacity=torch.cuda.is_available()), rank=rank)
    uses_graph = graph_obstacle(settings, on_cuda=device.type == "cuda") is None
    if uses_graph:
        # A graph cannot be captured on the default stream, nor if gradients are accumulated there. Autograd accumulates
        # them on the stream on which the model was wrapped.
        torch.cuda.set_stream(torch.cuda.Stream(device))
    # Validation uses the settings and documents of the first phase in all phases, so that a curve is comparable. Only
    # the objective changes with the phase.
    validation = opened[0].validation if settings.training.eval_iters else {}
    vocab_size = opened[0].tokenizer.vocab_size
    model = build_model(settings, device, vocab_size=vocab_size, draws_weights=draws_weights)
    optimizer = build_optimizer(settings, model)
    run = Run(
        settings=settings,
        device=device,
        opened=opened,
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(settings, optimizer),
        training_stream=training_stream,
        validation_streams={
            name: replace(training_stream, phases=(replace(training_stream.phases[0], sources=sources),))
            for name, sources in validation.items()
        },
        state=TrainState(corpus_sha256=opened[0].sha256, first_corpus_sha256=opened[0].sha256),
        graph=GraphedSchedule() if uses_graph else None,
    )

    def finalize(*args: Any, **options: Any) -> None:
        run.has_gradients()
        finalize_gradients(*args, **options)

    run.model.config.finalize_model_grads_func = finalize
    return run


def build_model(
    settings: Settings, device: torch.device, *, vocab_size: int, draws_weights: bool = True
) -> DistributedDataParallel:
    """Build this rank's pipeline stage on `device`, wrapped for training. Collective: all ranks."""
    model = NeoBERTModel(
        settings,
        vocab_size=vocab_size,
        draws_weights=draws_weights,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    wrapped = wrap_model(settings, model.to(device))
    wrapped.config.finalize_model_grads_func = finalize_gradients
    if wrapped.ddp_config.overlap_grad_reduce:
        wrapped.config.no_sync_func = wrapped.no_sync
    return wrapped


def wrap_model(settings: Settings, model: Any) -> DistributedDataParallel:
    """Wrap a model for data parallelism and, with --bf16, for bfloat16. Collective: the data-parallel group."""
    parallel, config = settings.parallel, model.config
    overlaps = torch.cuda.is_available() if parallel.overlap_grad_reduce is None else parallel.overlap_grad_reduce
    if settings.training.bf16:
        model = Float16Module(config, model)
    if choose_kernels(settings).transformer_impl == "transformer_engine":
        # Megatron's option gradient_accumulation_fusion would need Apex for the decoder, which is a Megatron layer. Set
        # here and not at construction, because the layers add into gradient buffers that only a wrapped model has.
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps and settings.use_distributed_optimizer,
            use_distributed_optimizer=settings.use_distributed_optimizer,
            bucket_size=parallel.bucket_parameters,
        ),
        model,
    )
