"""The command `neobert recipe`: write settings of a run for a size of model or an amount of computation."""

from megatron_neobert.errors import OutputError
from megatron_neobert.planning.recipe import RecipeOptions, choose_recipe, summarize, to_yaml
from megatron_neobert.runtime.atomic_files import replace_file


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
