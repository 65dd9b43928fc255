"""Command: pseudo-perplexity of encoders against the length of texts.

    neobert evaluate ppl --model model other/bert --data wikipedia/*.parquet --text-key text \
        --output results --positions-per-doc 128 --documents-per-bin 200

Masks one token at a time, never those that the tokenizer adds. Writes OUTPUT/MODEL/pseudo_perplexity.json, one line
per document beside it, and the curves of all models as OUTPUT/pseudo_perplexity.csv, .md and .png. Started again, it
resumes; documents measured with other settings are kept apart.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from megatron_neobert.errors import CommandParser, ConfigError, positive
from megatron_neobert.runtime.atomic_files import name_models

LENGTH_BINS = (128, 256, 512, 1024, 2048, 4096, 8192)
BATCH_TOKENS = 16384  # of a forward pass, unless it is given
SECONDS_BETWEEN_LINES = 30.0  # where there is no terminal to draw a bar on


def main() -> None:
    """Reads the arguments, measures one model after the other, and draws their curves."""
    arguments = _parse()
    _check(arguments)
    import torch

    from megatron_neobert.data.inputs.records import ReadSettings
    from megatron_neobert.evaluation.encoders import LoadOptions, choose_device
    from megatron_neobert.evaluation.pseudo_perplexity.documents import Choice
    from megatron_neobert.evaluation.pseudo_perplexity.run import Evaluation, evaluate, write_curves

    evaluation = Evaluation(
        inputs=tuple(arguments.data),
        read=ReadSettings(text_key=arguments.text_key),
        choice=Choice(
            max_length=arguments.max_length,
            min_length=arguments.min_length,
            limit=arguments.limit,
            documents_per_bin=arguments.documents_per_bin,
            length_bins=tuple(arguments.length_bins),
            positions_per_document=arguments.positions_per_doc,
            seed=arguments.seed,
        ),
        options=LoadOptions(
            dtype=getattr(torch, arguments.dtype),
            device=choose_device(arguments.device),
            attention=arguments.attention,
        ),
        batch_tokens=arguments.batch_tokens,
    )
    results = {}
    for name, folder in name_models(arguments.model).items():
        found = results[name] = evaluate(folder, arguments.output, evaluation, _show_progress)
        value, error = f"{found['pseudo_perplexity']:.6g}", found["standard_error"]
        drawn = f" ± {error:.3g} (standard error, of the positions drawn)" if error else ""
        print(f"{name}: pseudo-perplexity {value}{drawn}, {found['documents']:,} documents", flush=True)
    write_curves(arguments.output, results)
    print(f"wrote {arguments.output / 'pseudo_perplexity.csv'}, .md and .png")


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--model", nargs="+", required=True, type=Path, metavar="DIR", help="Hugging Face folders")
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="parquet, Arrow, JSON or text; globs and folders as well",
    )
    add("--text-key", default="content", metavar="KEY", help="column or key (default: %(default)s)")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for the results")
    add("--positions-per-doc", type=positive, metavar="K", help="mask K tokens of each document, drawn (default: all)")
    add(
        "--max-length",
        type=positive,
        metavar="N",
        help="cut documents after N tokens (default: the model's longest input)",
    )
    add(
        "--min-length",
        type=positive,
        default=16,
        metavar="N",
        help="leave out shorter documents (default: %(default)s tokens)",
    )
    add(
        "--length-bins",
        type=positive,
        nargs="+",
        default=list(LENGTH_BINS),
        metavar="N",
        help=f"upper ends, in tokens, of the lengths that are averaged (default: {' '.join(map(str, LENGTH_BINS))})",
    )
    add("--documents-per-bin", type=positive, metavar="N", help="only the first N of each length (default: all)")
    add("--limit", type=positive, metavar="N", help="only the first N documents (default: all)")
    add("--seed", type=int, default=0, help="of --positions-per-doc (default: %(default)s)")
    add(
        "--batch-tokens",
        type=positive,
        default=BATCH_TOKENS,
        metavar="N",
        help="of one batch, at most (default: %(default)s)",
    )
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="default: %(default)s")
    add("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    add("--attention", metavar="NAME", help="eager, sdpa, flash_attention_2 (default: transformers' choice)")
    return parser.parse_args()


def _check(arguments: argparse.Namespace) -> None:
    bins = arguments.length_bins
    if any(low >= high for low, high in pairwise(bins)):
        raise ConfigError(f"--length-bins {' '.join(map(str, bins))} must increase.")
    name_models(arguments.model)
    # Before seconds of imports and the loading of models.
    from megatron_neobert.data.inputs.records import ReadSettings
    from megatron_neobert.evaluation.pseudo_perplexity.documents import refuse_no_text

    refuse_no_text(arguments.data, ReadSettings(text_key=arguments.text_key))


@contextmanager
def _show_progress(name: str, total_tokens: int) -> Iterator[Callable[[int], None]]:
    """Tokens a second and the time that remains, where there is no terminal as a line now and then."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    with tqdm(total=total_tokens, desc=name, unit=" tokens", unit_scale=True, mininterval=seconds) as bar:
        yield bar.update
