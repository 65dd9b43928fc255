"""Lets transformers load `neobert` folders with this project's class: no remote code, and no file that lies in them.

Once registered, AutoModel and its kind, pipelines, SentenceTransformer and everything else built on them load such a
folder with trust_remote_code=False.
"""

import transformers

from megatron_neobert.huggingface import modeling_neobert


def register_neobert() -> None:
    """Makes transformers of this process know the model type `neobert`; may be called again."""
    for auto_class, path in modeling_neobert.AUTO_MAP.items():
        own = getattr(modeling_neobert, path.split(".")[1])
        if auto_class == "AutoConfig":
            transformers.AutoConfig.register(own.model_type, own, exist_ok=True)
        else:
            getattr(transformers, auto_class).register(modeling_neobert.NeoBERTConfig, own, exist_ok=True)
