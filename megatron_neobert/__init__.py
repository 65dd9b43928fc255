"""Pre-training of NeoBERT encoders on Megatron-Core: raw web shards in, a Hugging Face model out."""

import warnings

__version__ = "0.1.0"

# What megatron.core and torch.distributed say, a dozen times over, and nobody who runs this can act on: deprecated
# names, the absence of Transformer Engine and Apex, and that a converter reads a checkpoint in one process. Other
# warnings of theirs are shown.
_UNINTERESTING = (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
    "torch.distributed is disabled, unavailable or uninitialized",
)
_MODULES = r"megatron\.core|torch\.distributed"
warnings.filterwarnings("ignore", category=FutureWarning, module=_MODULES)
warnings.filterwarnings("ignore", message="|".join(_UNINTERESTING), module=_MODULES)
