"""Whether the kernels and precisions that were asked for go with the other settings: every reason why not.

Standard library only; what the machine can do is another question (model/kernels.py). Each message names the values,
the rule and the remedy.
"""

from collections.abc import Iterator

from megatron_neobert.config.schema import Settings

# Tokens of a rank and both sides of every matrix must be multiples of this, so that no FP8 kernel gets a part of its
# block. Source: TransformerEngine 2.11 pytorch/utils.py assert_dim_for_fp8_exec, and the block lengths in
# pytorch/tensor/mxfp8_tensor.py and float8_blockwise_tensor.py.
FP8_BLOCK = {"tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128}
# The tokens that are exchanged in FP8 between sequence-parallel ranks; 128 also suits the block-scaled recipes' scales.
FP8_TOKENS = {"tensorwise": 16, "delayed": 16, "mxfp8": 128, "blockwise": 128}
HEAD_WIDTH_MULTIPLE = 8  # of fused attention kernels: FlashAttention's, torch's and Transformer Engine's


def compute_problems(settings: Settings) -> Iterator[str]:
    """Every reason why the compute section cannot stand beside the others; each value alone must be legal."""
    if settings.compute.attention_backend == "fused":
        yield from cudnn_problems(settings)
    if settings.compute.fp8_format is not None:
        yield from fp8_problems(settings)


def cudnn_problems(settings: Settings) -> Iterator[str]:
    model = settings.model
    width = model.hidden_size // model.num_attention_heads
    if settings.compute.transformer_impl == "local":
        yield (
            "--attention-backend fused is cuDNN through Transformer Engine, not with --transformer-impl local; use "
            "--transformer-impl transformer_engine or --attention-backend auto."
        )
    if width % HEAD_WIDTH_MULTIPLE:
        yield (
            f"--attention-backend fused needs heads of a width divisible by {HEAD_WIDTH_MULTIPLE}, not --hidden-size "
            f"{model.hidden_size} / --num-attention-heads {model.num_attention_heads} = {width}; use "
            "--attention-backend auto."
        )


def fp8_problems(settings: Settings) -> Iterator[str]:
    compute = settings.compute
    if compute.transformer_impl == "local":
        yield (
            f"--fp8-format {compute.fp8_format} is Transformer Engine's, not with --transformer-impl local; use "
            "--transformer-impl transformer_engine."
        )
    if compute.fp8_param_gather and compute.fp8_recipe == "mxfp8":
        yield (
            "--fp8-param-gather does not go with --fp8-recipe mxfp8, whose weights Megatron gathers through the "
            "gradients' memory; leave it out."
        )
    if compute.fp8_param_gather and compute.fp8_recipe == "delayed":
        # Source: TransformerEngine 2.11 pytorch/quantization.py DelayedScalingRecipeState, pytorch/module/base.py
        # reset_parameters: a scale of ones when weights are cast first; E4M3 then has steps of 2 ** -9 below 2 ** -6.
        yield (
            "--fp8-param-gather does not go with --fp8-recipe delayed, which casts the first weights with a scale of "
            "1: those of this model are so small that 1/512 would be the distance between two values; use "
            "--fp8-recipe tensorwise, or leave --fp8-param-gather out."
        )
    if compute.first_last_layers_bf16:
        yield from bf16_layer_problems(settings)
    yield from alignment_problems(settings)


def bf16_layer_problems(settings: Settings) -> Iterator[str]:
    if settings.compute.fp8_recipe == "delayed":
        yield (
            "--first-last-layers-bf16 does not go with --fp8-recipe delayed, whose scales are updated once for all "
            "layers; use --fp8-recipe tensorwise."
        )
    if settings.model.num_layers < 3:
        yield (
            f"--first-last-layers-bf16 leaves none of --num-layers {settings.model.num_layers} in FP8; use at least 3 "
            "layers, or leave out --fp8-format."
        )


def alignment_problems(settings: Settings) -> Iterator[str]:
    """Each tensor-parallel rank has an equal part of the attention's output and of the feed-forward.

    The other sides of the matrices are multiples of these; the tokens are judged with the batch (rules.py).
    """
    model, recipe, tp = settings.model, settings.compute.fp8_recipe, settings.parallel.tensor_model_parallel_size
    block = FP8_BLOCK[recipe]
    for what, size, flag in (
        ("--hidden-size", model.hidden_size, "--hidden-size"),
        ("the feed-forward width (--ffn-hidden-size)", model.ffn_width, "--ffn-hidden-size"),
    ):
        if size % (block * tp):
            per_rank = f" over --tensor-model-parallel-size {tp} = {size / tp:g}" if tp > 1 else ""
            fewer = "" if size % block else " or --tensor-model-parallel-size 1"
            coarser = " or --fp8-recipe tensorwise" if block > 16 else ""
            yield (
                f"--fp8-recipe {recipe} needs matrices whose sides are multiples of {block}: {what} {size}{per_rank} "
                f"is not. Use {flag} {-(-size // (block * tp)) * block * tp}{fewer}{coarser}."
            )
