"""Pre-training of NeoBERT encoders on Megatron-Core: raw web shards in, a Hugging Face model out."""

import warnings

__version__ = "0.1.0"

# Importing megatron.core says six times that Apex is not installed, and each first collective that a name is
# deprecated in torch. Nobody who runs this can act on either.
for _category in (UserWarning, FutureWarning):
    warnings.filterwarnings("ignore", category=_category, module=r"megatron\.core|torch\.distributed")
