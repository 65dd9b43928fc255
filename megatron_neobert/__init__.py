"""Pre-training of NeoBERT encoders on Megatron-Core: raw web shards in, a Hugging Face model out."""

import warnings

__version__ = "0.1.0"

# Importing and using megatron.core says a dozen times what nobody who runs this can act on.
for _message in (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    ".*is deprecated",
):
    warnings.filterwarnings("ignore", message=_message, module=r"megatron\.core|torch\.distributed")
