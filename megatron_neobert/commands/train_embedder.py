"""The command `neobert train-embedder`: fine-tune an encoder for embeddings."""

from dataclasses import replace

from megatron_neobert.evaluation.options import EmbedderOptions
from megatron_neobert.huggingface.hub import find_model, go_offline
from megatron_neobert.runtime.atomic_files import require_folder


def train_embedder(options: EmbedderOptions) -> None:
    """Fine-tune an encoder for embeddings with a contrastive loss, as NeoBERT's paper does before MTEB."""
    remedy = "create it, with KEY.parquet or KEY.jsonl for each dataset"
    require_folder("--data-dir", options.data_dir, remedy=remedy)
    options = replace(options, model=find_model("--model", options.model))
    go_offline()
    from megatron_neobert.evaluation.embed import run_contrastive

    run_contrastive(options)
