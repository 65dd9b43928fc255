"""The command `neobert recipe`: write settings of a run for a size of model or an amount of computation.

Rules replace a search: depth follows from width, tokens from parameters, batch and learning rate from computation.
docs/recipes.md has their sources and what was measured.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_neobert.cli import option
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.model.flops import count_parameters, training_flops_per_token
from megatron_neobert.runtime.atomic_files import replace_file
from megatron_neobert.text import approximate, with_prefix

_SEQ_LENGTH = 1024
_HEAD_WIDTH = 64
_WIDTHS = range(128, 4097, _HEAD_WIDTH)
_NEAR = 1.3  # largest ratio of a size and the nearest width's; neighbouring widths differ by up to 1.3 squared
_FEWEST_LAYERS = 4
# Tokens that the average token attends to in RefinedWeb's documents, cut at 1,024: what a plan without data counts.
_ATTENDED_TOKENS = 707
# Chinchilla's 20 (arXiv 2203.15556) for each predicted token; a fifth of all tokens is predicted.
_TOKENS_PER_PARAMETER = 100
# NeoBERT: computation, peak rate, and sequences per batch.
_NEOBERT_FLOPS, _NEOBERT_RATE, _LARGEST_BATCH = 2.9e21, 6e-4, 2048
# From 6e13 operations, where 2e-3 was the best rate of a small model, to NeoBERT's: ln(2e-3 / 6e-4) / ln(2.9e21 / 6e13)
# is 0.07, and 0.06 from the smallest of the models.
_RATE_POWER = 0.06
_SMALLEST_BATCH = 8
_FEWEST_TOKENS, _MOST_TOKENS = _SMALLEST_BATCH * _SEQ_LENGTH, 1e15  # FineWeb has 1.5e13
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def _read_quantity(text: str) -> float:
    factor = _SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        value = factor * float(text[:-1] if factor > 1 else text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("is not a positive number, as in 60M, 2.5B or 1e19.")
    return value


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options of `neobert recipe`. Give one or two of --parameters, --tokens and --budget-flop, not --tokens alone."""

    parameters: float | None = option(None, "size of the model, as 60M", metavar="N", read=_read_quantity)
    tokens: float | None = option(
        None, f"length of the run, as 20B (default: {_TOKENS_PER_PARAMETER} per parameter)", read=_read_quantity
    )
    budget_flop: float | None = option(
        None, "computation of the run, as 1e19 floating-point operations", metavar="N", read=_read_quantity
    )
    vocab_size: int = option(30_522, "tokens in the vocabulary", minimum=2)
    output: Path = option(help="YAML file to write, for neobert train --config")


def recipe(options: RecipeOptions) -> None:
    """Write a recipe for a model of about this size, or for about this many floating-point operations."""
    if options.output.exists():
        raise OutputError(f"{options.output} exists; remove it, or name another --output.")
    chosen, size = choose_recipe(options), options.parameters
    if size and abs(difference := chosen.parameters / size - 1) > 0.05:
        print(f"no shape is nearer to --parameters {size:g}; this one differs by {100 * difference:+.0f} %")
    replace_file(options.output, to_yaml(chosen))
    print(summarize(chosen))
    print(f"wrote {options.output}; neobert train --config {options.output} --gpus 8 --dry-run plans it")


@dataclass(frozen=True)
class Recipe:
    """Shape of a model, and batch size and length of the run that trains this model."""

    model: ModelConfig
    parameters: int
    flops: float  # of the whole run
    batch: int  # sequences per iteration
    iterations: int

    @property
    def rate(self) -> float:
        """Peak learning rate, by a power law of `flops` fitted to NeoBERT's rate and the best rates of small models."""
        return float(f"{_NEOBERT_RATE * (_NEOBERT_FLOPS / self.flops) ** _RATE_POWER:.2g}")


def choose_recipe(options: RecipeOptions) -> Recipe:
    """Return the recipe whose size, or computation if no size is given, is nearest to the options.

    Raise ConfigError if the options give only tokens, or all or none of parameters, tokens and computation, or if no
    recipe is close to this size, computation or length.
    """
    size, budget, tokens = options.parameters, options.budget_flop, options.tokens
    if (size is None and budget is None) or None not in (size, budget, tokens):
        raise ConfigError("give --parameters or --budget-flop, or two of --parameters, --budget-flop and --tokens.")
    shapes = [_shape(width, options.vocab_size) for width in _WIDTHS]
    if size is not None:
        flags, wanted = f"--parameters {size:g}", size
    else:
        assert budget is not None
        flags, wanted = f"--budget-flop {budget:g} --tokens {tokens or 0:g}", budget / (tokens or _TOKENS_PER_PARAMETER)

    def value(shape: tuple[ModelConfig, int, float]) -> float:
        """Return the quantity of a shape that should be near `wanted`."""
        _, parameters, flops = shape
        return parameters if size else flops * (1 if tokens else parameters)

    def distance(shape: tuple[ModelConfig, int, float]) -> float:
        return abs(math.log(value(shape) / wanted))

    if (size or tokens) and not value(shapes[0]) <= wanted * _NEAR <= _NEAR**2 * value(shapes[-1]):
        limits = f"{with_prefix(value(shapes[0]), '')} to {with_prefix(value(shapes[-1]), '')}"
        unit = "parameters" if size else "floating-point operations per token"
        raise ConfigError(f"{flags}: recipes have {limits} {unit} with this vocabulary; give other numbers.")
    model, parameters, flops_per_token = min(shapes, key=distance)
    if size or tokens:  # are met more closely by another depth of the nearest width
        depths = range(_FEWEST_LAYERS, 2 * model.num_layers)
        model, parameters, flops_per_token = min(
            (_shape(model.hidden_size, options.vocab_size, layers=layers) for layers in depths), key=distance
        )
    if tokens is None:
        tokens = _TOKENS_PER_PARAMETER * parameters if budget is None else budget / flops_per_token
    if not _FEWEST_TOKENS <= tokens <= _MOST_TOKENS:
        given = {"--parameters": size, "--budget-flop": budget, "--tokens": options.tokens}
        flags = " ".join(f"{flag} {value:g}" for flag, value in given.items() if value is not None)
        raise ConfigError(
            f"{flags}: a run of {tokens:.3g} tokens has no recipe; recipes have {_FEWEST_TOKENS:,} (one batch) to "
            f"{_MOST_TOKENS:.0e} tokens. Give other numbers."
        )
    flops = tokens * flops_per_token
    # Law of DeepSeek (arXiv 2401.02954), in tokens.
    batch = 2 ** round(math.log2(0.292 * flops**0.3271 / _SEQ_LENGTH))
    batch = min(max(batch, _SMALLEST_BATCH), _LARGEST_BATCH)
    return Recipe(model, parameters, flops, batch, math.ceil(tokens / (batch * _SEQ_LENGTH)))


def _shape(width: int, vocab_size: int, *, layers: int | None = None) -> tuple[ModelConfig, int, float]:
    """Return the model of a width, its parameter count, and its floating-point operations per token.

    By default, `layers` is the depth beyond which more width is better: ln(width) = 5.039 + 0.0555 layers.

    Source: Levine et al., arXiv 2006.12467.
    """
    layers = layers or max(_FEWEST_LAYERS, int((math.log(width) - 5.039) / 0.0555))
    model = ModelConfig(num_layers=layers, hidden_size=width, num_attention_heads=width // _HEAD_WIDTH)
    settings = Settings(model=model)
    flops = training_flops_per_token(settings, vocab_size=vocab_size, document_tokens=_ATTENDED_TOKENS)
    return model, count_parameters(model, vocab_size=vocab_size).total, flops


def summarize(recipe: Recipe) -> str:
    """Format a recipe's model size, number of tokens and FLOP on one line."""
    model, tokens = recipe.model, recipe.iterations * recipe.batch * _SEQ_LENGTH
    return (
        f"{approximate(recipe.parameters)} parameters in {model.num_layers} layers of width {model.hidden_size}; "
        f"{approximate(tokens)} tokens, {recipe.flops:.3g} FLOP".replace("e+", "e")
    )


def to_yaml(recipe: Recipe) -> str:
    """Return a recipe as the text of a YAML file. Settings that it leaves out default to NeoBERT's."""
    warmup = min(2000, recipe.iterations // 10)
    # At most the memory of NeoBERT's 64 sequences, 50 GiB. A start lowers the size to the batch of a rank.
    fitting = 64 * 28 * 768 / (recipe.model.num_layers * recipe.model.hidden_size)
    micro = 2 ** int(math.log2(min(64, max(1, fitting), recipe.batch)))
    return f"""# {summarize(recipe)}.
# Written by neobert recipe. Settings that are left out are NeoBERT's (arXiv 2502.19587).
model:
  num_layers: {recipe.model.num_layers}
  hidden_size: {recipe.model.hidden_size}
  num_attention_heads: {recipe.model.num_attention_heads}
data:
  seq_length: {_SEQ_LENGTH}
optimizer:
  lr: {recipe.rate}
  min_lr: {recipe.rate / 10:.2g}
  lr_warmup_iters: {warmup}
training:
  micro_batch_size: {micro}
  global_batch_size: {recipe.batch}
  train_iters: {recipe.iterations}
  bf16: true
checkpoint:
  save_interval: {max(1, min(2000, recipe.iterations // 10))}
  keep_last: 3
"""
