"""Command: fine-tune an encoder contrastively for embeddings, as NeoBERT's paper does before MTEB.

    neobert finetune --model DIR --config evaluation/contrastive --data-dir DIR \\
        --output DIR

Writes OUTPUT/NAME/NAME-contrastive, which `SentenceTransformer(folder)` loads, the loss as CSV and PNG, and
contrastive.json; NAME is the model's folder. Works without network; neobert fetch contrastive fetches the datasets
where there is one. Start it with torchrun for several GPUs: each of them computes batches of its own.
"""

import argparse
import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import CommandParser, ConfigError, OutputError, positive
from megatron_neobert.huggingface.offline import go_offline
from megatron_neobert.runtime.atomic_files import require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from megatron_neobert.evaluation.contrastive.config import ContrastiveConfig

_OVERRIDES = ("steps", "batch_size", "learning_rate", "instructions", "max_length", "save_interval")


def main() -> None:
    """Reads the arguments and trains."""
    arguments = _parse()
    require_folder("--model", arguments.model, holding="config.json")
    fetch = "on a machine with network: neobert fetch contrastive --data-dir DIR"
    require_folder("--data-dir", arguments.data_dir, remedy=fetch)
    go_offline()
    from megatron_neobert.evaluation.contrastive.config import TrainingSettings, build, read_config

    config, problems = read_config(arguments.config), list[str]()
    changes = {name: value for name in _OVERRIDES if (value := getattr(arguments, name)) is not None}
    training = build(TrainingSettings, {**asdict(config.training), **changes}, "flags: ", problems)
    if problems:
        raise ConfigError(problems)
    _run(arguments, replace(config, training=training), _choose(arguments.limit_datasets, config))


def _parse() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="Hugging Face folder of an encoder")
    settings = "settings and datasets, or a recipe: evaluation/contrastive"
    add("--config", required=True, type=find_config, metavar="FILE", help=settings)
    add("--data-dir", required=True, type=Path, metavar="DIR", help="a file or folder per dataset")
    add("--output", required=True, type=Path, metavar="DIR", help="of results")
    overrides = parser.add_argument_group("instead of the settings of the file")
    overrides.add_argument("--steps", type=int, metavar="N")
    overrides.add_argument("--batch-size", type=int, metavar="PAIRS", help="per process, before a dataset's divisor")
    overrides.add_argument("--learning-rate", type=float, metavar="X")
    overrides.add_argument("--instructions", choices=["query", "both", "none"], help="texts they are put before")
    overrides.add_argument("--max-length", type=int, metavar="TOKENS")
    overrides.add_argument("--save-interval", type=int, metavar="STEPS")
    add(
        "--limit-datasets", nargs="+", metavar="KEY", help="use only these (default: all but those with default: false)"
    )
    add("--limit", type=positive, metavar="N", help="first N pairs of each dataset: a quick look")
    add("--skip-missing", action="store_true", help="train without the datasets that are not there")
    add(
        "--gradient-cache",
        type=positive,
        metavar="N",
        help="compute N texts at a time and cache gradients: large batches in little memory, about half as fast",
    )
    add("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="to compute in; the weights stay float32 (default: bfloat16 on GPUs, else float32)",
    )
    add("--device", choices=["cpu", "cuda"], help="(default: a GPU if there is one)")
    add("--attention", metavar="NAME", help="implementation in transformers, such as sdpa")
    add(
        "--resume", action="store_true", help="resume from the newest checkpoint in --output, or start if there is none"
    )
    return parser.parse_args()


def _choose(wanted: list[str] | None, config: "ContrastiveConfig") -> list[str]:
    if wanted is None:
        return [key for key, source in config.datasets.items() if source.default]
    unknown = [key for key in wanted if key not in config.datasets]
    if unknown:
        raise ConfigError(f"--limit-datasets {' '.join(unknown)}: unknown; the file has {', '.join(config.datasets)}.")
    return [key for key in config.datasets if key in wanted]


def _run(arguments: argparse.Namespace, config: "ContrastiveConfig", keys: list[str]) -> None:
    from megatron_neobert.evaluation.contrastive.data import find_local, load_pairs
    from megatron_neobert.evaluation.contrastive.run import Places, RunOptions, finetune, prepare_folder, settings_of
    from megatron_neobert.evaluation.encoders import choose_device, fingerprint
    from megatron_neobert.evaluation.records import hold, write_record

    model, device = arguments.model, choose_device(arguments.device).type
    options = RunOptions(
        seed=arguments.seed,
        gradient_cache=arguments.gradient_cache,
        autocast_bfloat16=(arguments.dtype or ("bfloat16" if device == "cuda" else "float32")) == "bfloat16",
        device=device,
        attention=arguments.attention,
        resume=arguments.resume,
    )
    fingerprint(model)  # refuses what is no model, before minutes of reading
    places = Places(arguments.output, model.resolve().name)
    if places.final.exists() and not arguments.resume:
        raise OutputError(f"{places.final} is there already; name another --output.")
    if places.final.exists() and places.file(".json").exists():
        print(f"{places.final} is there already")
        return
    paths = find_local(arguments.data_dir, keys, skip_missing=arguments.skip_missing)
    first = os.environ.get("RANK", "0") == "0"
    if first and len(paths) < len(keys):
        print(f"without {', '.join(sorted(set(keys) - set(paths)))}: no data")
    pairs = {key: load_pairs(key, config.datasets[key], path, limit=arguments.limit) for key, path in paths.items()}
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings = settings_of(model, pairs, config.datasets, config.training, options, processes=processes)
    with hold(places.file(".lock")) if first else nullcontext():
        if first:
            prepare_folder(places.checkpoints, settings, resume=arguments.resume)
        results = finetune(model, pairs, config.datasets, config.training, places, options)
        if results is None:
            return
        for key, share in results["datasets"].items():
            batches = f"{share['batches']} batches of {share['pairs_per_batch']} pairs from {share['rows']:,}"
            print(f"{key}: {batches}, p = {share['probability']:.3f}")
        losses = f"{results['first_loss_nats']:.3f} -> {results['last_loss_nats']:.3f} nats"
        print(f"loss {losses} in {results['seconds_of_this_start']:.0f} s; wrote {results['folder']}")
        record = places.file(".json")
        write_record(record, "contrastive", folder=model, settings=settings, results=results, device=device)
