"""A folder with a BERT of 2 layers x 32, with dropout and its own vocabulary."""

from collections.abc import Sequence
from pathlib import Path

import transformers
from transformers import BertConfig, BertForMaskedLM
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer


def write_bert(folder: Path, words: Sequence[str], *, positions: int) -> Path:
    tokenizer = load_tokenizer(write_vocabulary(folder.parent / "vocab.txt", words))
    config = BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=positions,
    )
    transformers.set_seed(0)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_tokenizer_files(folder, model_max_length=positions)
    return folder
