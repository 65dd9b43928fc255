"""The command `neobert train-embedder`: fine-tune an encoder for embeddings."""

from megatron_neobert.evaluation.options import EmbedderOptions, with_local_model


def train_embedder(options: EmbedderOptions) -> None:
    """Fine-tune an encoder for embeddings with a contrastive loss, as NeoBERT's paper does before MTEB."""
    options = with_local_model(options, "create it, with KEY.parquet or KEY.jsonl for each dataset")
    from megatron_neobert.evaluation.embed import run_contrastive

    run_contrastive(options)
