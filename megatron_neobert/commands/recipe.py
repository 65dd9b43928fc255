"""The command `neobert recipe`: write settings of a run for a size of model or an amount of computation."""

from megatron_neobert.errors import OutputError
from megatron_neobert.planning.recipe import RecipeOptions, choose_recipe, summarize, to_yaml
from megatron_neobert.runtime.atomic_files import replace_file


def recipe(options: RecipeOptions) -> None:
    """Write a recipe for a model of about this size, or for about this many floating-point operations."""
    if options.output.exists():
        raise OutputError(f"{options.output} exists; remove it, or name another --output.")
    chosen = choose_recipe(options)
    replace_file(options.output, to_yaml(chosen))
    print(f"{summarize(chosen)}\nwrote {options.output}; neobert train --config {options.output} --dry-run plans it")
