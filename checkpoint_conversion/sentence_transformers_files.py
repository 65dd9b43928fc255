"""Files that make a Hugging Face folder a sentence-transformers model: `SentenceTransformer(folder)` then encodes.

A text's embedding is the mean of its tokens' last hidden states, [CLS] and [SEP] included and padding excluded. A
pre-trained encoder has learnt no embeddings yet; this is the start for training them. The files are written in the
spelling of sentence-transformers 3, which 6 still reads, because 3 cannot read that of 6.
"""

import json
from pathlib import Path
from typing import Any

from megatron_neobert.errors import OutputError

# Old versions of sentence-transformers ignore this; transformers before 5.3 then refuses EuroBERT but computes a
# LlamaModel with causal attention.
_NATIVE = {"specifier": ">=5.3", "reason": "Older versions do not know this architecture as an encoder."}
_REMOTE_CODE = {"specifier": ">=4.48", "reason": "modeling_neobert.py needs its attention interface."}

# No Normalize module follows the pooling: cosine similarity divides by the lengths itself, and whoever trains for dot
# products needs them.
_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def write_sentence_transformers_files(
    folder: Path, *, hidden_size: int, max_seq_length: int, needs_remote_code: bool
) -> None:
    """Adds modules.json, 1_Pooling/config.json and two settings files to a folder with model and tokenizer.

    Args:
        hidden_size: Width of an embedding.
        max_seq_length: Longest input in tokens, [CLS] and [SEP] included; what is beyond it is cut off.
        needs_remote_code: The folder carries modeling_neobert.py. Whoever loads it has to say trust_remote_code=True,
            which no file can say for them; only the versions of transformers that it asks for depend on it.

    Raises:
        OutputError: A file cannot be written.
    """
    pooling = {
        "word_embedding_dimension": hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
        "pooling_mode_weightedmean_tokens": False,
        "pooling_mode_lasttoken": False,
        "include_prompt": True,
    }
    # do_lower_case would be on top of what the tokenizer does.
    transformer = {"max_seq_length": max_seq_length, "do_lower_case": False}
    whole = {
        "model_type": "SentenceTransformer",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
        "requirements": {"transformers": _REMOTE_CODE if needs_remote_code else _NATIVE},
    }
    try:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        _write(folder / "modules.json", _MODULES)
        _write(folder / "1_Pooling" / "config.json", pooling)
        _write(folder / "sentence_bert_config.json", transformer)
        _write(folder / "config_sentence_transformers.json", whole)
    except OSError as error:
        raise OutputError(f"{error.filename}: cannot be written ({error.strerror}); choose another folder.") from error


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
