"""Pre-training of NeoBERT encoders on Megatron-Core: raw web shards in, a Hugging Face model out."""

__version__ = "0.1.0"
