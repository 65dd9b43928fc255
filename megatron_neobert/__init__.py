"""Pre-training of NeoBERT encoders on Megatron-Core: raw web shards in, a Hugging Face model out."""

import sys
import warnings

__version__ = "0.2.0"

# `check environment` alone runs on an older Python, where it reports the version.
if sys.version_info < (3, 10) and sys.argv[1:3] != ["check", "environment"]:
    sys.stderr.write(
        f"error: {sys.executable} is Python {'.'.join(map(str, sys.version_info[:2]))}, and this project needs 3.10 to "
        "3.13; start the command with the .venv/bin/python that bash tools/prepare_environment.sh makes\n"
    )
    sys.exit(69)

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
