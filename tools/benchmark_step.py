"""Command: how much faster is a training step than the reference's?

Trains the same documents with the same masks from the same weights twice: as this project does (documents packed end
to end, decoder at the masked positions) and as the reference does (padded to the longest, decoder at every position;
plain PyTorch with SDPA and AdamW). To save memory, both may take a batch in several passes; the reference's are all as
wide as the longest document of the batch. Both take turns in one process, so that the machine's mood hits both; the
losses stand side by side. Document lengths are log-normal, about those of the web.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_neobert.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Settings,
    TrainingConfig,
)
from megatron_neobert.errors import run_command

LEARNING_RATE = 1e-4
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Timing:
    """One step of one implementation."""

    cpu_seconds: float
    wall_seconds: float
    loss: float  # nats per masked token


def main() -> int:
    """Measures and prints one line per pair of steps, then the medians."""
    parser = argparse.ArgumentParser(prog="benchmark_step.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--num-layers", type=int, default=6, help="default %(default)s")
    parser.add_argument("--hidden-size", type=int, default=384, help="default %(default)s")
    parser.add_argument("--num-attention-heads", type=int, default=6, help="default %(default)s")
    parser.add_argument("--vocab-size", type=int, default=30_522, help="default %(default)s")
    parser.add_argument("--seq-length", type=int, default=1024, help="longest document, in tokens (%(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="packed rows per forward pass (%(default)s)")
    parser.add_argument("--global-batch-size", type=int, default=8, help="packed rows per step (%(default)s)")
    parser.add_argument(
        "--reference-micro-batch-size", type=int, default=10**9, help="documents per pass there (all), to save memory"
    )
    parser.add_argument("--median-tokens", type=int, default=400, help="median document (%(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="steps of each, after one to warm up (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default %(default)s")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 on this project's side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(arguments, Path(folder))


def measure(arguments: argparse.Namespace, folder: Path) -> int:
    """Builds both models, lets them train in turn, and prints the table."""
    import torch

    from megatron_neobert import distributed
    from megatron_neobert.training.build import build_run

    torch.set_num_threads(arguments.threads)
    settings = build_settings(arguments, folder)
    run = build_run(settings)
    reference, reference_step = build_reference(
        settings, arguments.vocab_size, documents_per_pass=arguments.reference_micro_batch_size
    )
    share_weights(run, reference, arguments.vocab_size)
    parameters = sum(parameter.numel() for parameter in reference.parameters())
    print(f"{arguments.num_layers} x {arguments.hidden_size}, {parameters:,} parameters, {arguments.threads} thread(s)")

    pairs: list[tuple[int, Timing, Timing]] = []  # tokens, ours, the reference's
    for number, batches in zip(range(arguments.pairs + 1), run.training_stream.steps(), strict=False):
        inputs = to_padded(batches.micro_batches)
        tokens = batches.real_tokens
        ours = time_step(partial(our_step, run, batches))
        theirs = time_step(partial(reference_step, *inputs))
        if number == 0:  # the first step of each allocates what later ones reuse
            continue
        pairs.append((tokens, ours, theirs))
        print(
            f"{tokens:,} tokens in {len(inputs[0])} documents, {inputs[0].numel():,} when padded | "
            f"{tokens / ours.cpu_seconds:,.0f} against {tokens / theirs.cpu_seconds:,.0f} useful "
            f"tokens/cpu-s, {theirs.cpu_seconds / ours.cpu_seconds:.2f}x | loss {ours.loss:.6f} and {theirs.loss:.6f}",
            flush=True,
        )
    ratios = [theirs.cpu_seconds / ours.cpu_seconds for _, ours, theirs in pairs]
    gap = max(abs(ours.loss / theirs.loss - 1) for _, ours, theirs in pairs)
    print(f"median speed-up {statistics.median(ratios):.2f}x, losses within {gap:.1e} of each other")
    if arguments.json is not None:
        figures = [{"tokens": n, "ours": vars(ours), "reference": vars(theirs)} for n, ours, theirs in pairs]
        arguments.json.write_text(json.dumps({"arguments": str(arguments), "pairs": figures}, indent=1) + "\n")
    distributed.shut_down()
    return 0


def build_settings(arguments: argparse.Namespace, folder: Path) -> Settings:
    """Settings of this project's side; writes the corpus they name."""
    documents = 6 * (arguments.pairs + 1) * arguments.global_batch_size + 64
    prefix, vocabulary = write_corpus(folder, arguments, documents)
    return Settings(
        model=ModelConfig(
            num_layers=arguments.num_layers,
            hidden_size=arguments.hidden_size,
            num_attention_heads=arguments.num_attention_heads,
        ),
        data=DataConfig(
            data_path=prefix, tokenizer_model=vocabulary, seq_length=arguments.seq_length, split="1", num_workers=0
        ),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, min_lr=LEARNING_RATE, lr_decay_style="constant", lr_warmup_iters=0),
        training=TrainingConfig(
            micro_batch_size=arguments.micro_batch_size,
            global_batch_size=arguments.global_batch_size,
            bf16=arguments.bf16,
            eval_iters=0,
        ),
        checkpoint=CheckpointConfig(),
    )


def write_corpus(folder: Path, arguments: argparse.Namespace, documents: int) -> tuple[str, str]:
    """Documents of made-up words, one token each, of log-normal length; returns corpus prefix and vocabulary."""
    from megatron_neobert.data.preprocessing.plan import PreprocessSettings, plan_preprocessing
    from megatron_neobert.data.preprocessing.run import preprocess

    rng = random.Random(0)
    words = [f"w{number}" for number in range(arguments.vocab_size - len(SPECIAL))]
    vocabulary, shard = folder / "vocab.txt", folder / "shard.jsonl"
    vocabulary.write_text("".join(f"{word}\n" for word in (*SPECIAL, *words)), encoding="utf-8")
    lengths = [int(rng.lognormvariate(math.log(arguments.median_tokens), 0.8)) + 1 for _ in range(documents)]
    texts = [" ".join(rng.choices(words, k=min(length, arguments.seq_length - 2))) for length in lengths]
    shard.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts), encoding="utf-8")
    settings = PreprocessSettings((str(shard),), output_prefix=str(folder / "c"), tokenizer_model=str(vocabulary))
    preprocess(plan_preprocessing(settings), on_progress=lambda progress: None)
    return str(folder / "c_content_document"), str(vocabulary)


def build_reference(
    settings: Settings, vocab_size: int, *, documents_per_pass: int
) -> tuple[Any, Callable[..., float]]:
    """The plain model, and one training step of it on a padded batch."""
    import torch

    from checkpoint_conversion.megatron_reader import reference_config
    from megatron_neobert.model.reference import IGNORED_LABEL, ReferenceNeoBERT, mlm_loss

    torch.manual_seed(0)
    model = ReferenceNeoBERT(reference_config(settings, vocab_size=vocab_size))
    cfg = settings.optimizer
    betas = (cfg.adam_beta1, cfg.adam_beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cfg.lr, betas=betas, eps=cfg.adam_eps, weight_decay=cfg.weight_decay
    )

    def step(tokens_bs: torch.Tensor, mask_bs: torch.Tensor, labels_bs: torch.Tensor) -> float:
        optimizer.zero_grad()
        masked = int((labels_bs != IGNORED_LABEL).sum())
        loss = 0.0
        for part in zip(*(values.split(documents_per_pass) for values in (tokens_bs, mask_bs, labels_bs)), strict=True):
            total, _ = mlm_loss(model(*part[:2]), part[2])
            (total / masked).backward()
            loss += total.item() / masked
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad)
        optimizer.step()
        return loss

    return model, step


def share_weights(run: Any, reference: Any, vocab_size: int) -> None:
    """Gives this project's model the reference's weights."""
    from checkpoint_conversion.mapping import NEOBERT, to_internal
    from checkpoint_conversion.megatron_reader import model_shape
    from checkpoint_conversion.parity import load_into_megatron

    shape = model_shape(run.settings, vocab_size=vocab_size)
    load_into_megatron(run.unwrapped_model, to_internal(reference.state_dict(), shape, NEOBERT))
    run.optimizer.reload_model_params()


def to_padded(micro_batches: list[Any]) -> tuple[Any, Any, Any]:
    """The same documents as (tokens, attention mask, labels), each padded to the longest of all: [b, s]."""
    import torch

    from megatron_neobert.model.reference import IGNORED_LABEL

    tokens: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    for batch in micro_batches:
        labels_t = torch.full_like(batch.tokens_t, IGNORED_LABEL)
        labels_t[batch.masked_positions_m] = batch.labels_m
        bounds = [bound for bound in batch.cu_seqlens_n.tolist() if bound <= batch.real_tokens]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        tokens += batch.tokens_t[: batch.real_tokens].split(lengths)
        labels += labels_t[: batch.real_tokens].split(lengths)
    lengths_b = torch.tensor([len(document) for document in tokens])
    present_bs = torch.arange(int(lengths_b.max())) < lengths_b[:, None]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return pad(tokens), present_bs, pad(labels, padding_value=IGNORED_LABEL)


def our_step(run: Any, batches: Any) -> float:
    """One training step of this project; returns the mean loss of its masked tokens."""
    from megatron_neobert.training.step import train_step

    total, tokens, *_ = train_step(run, batches).sums.tolist()
    return total / tokens


def time_step(step: Callable[[], float]) -> Timing:
    """Runs one step; CPU seconds are those of all threads of this process."""
    cpu, wall = time.process_time(), time.perf_counter()
    loss = step()
    return Timing(time.process_time() - cpu, time.perf_counter() - wall, loss)


if __name__ == "__main__":
    run_command(main)
