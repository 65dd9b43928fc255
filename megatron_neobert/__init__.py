"""Pre-training of NeoBERT encoders on Megatron-Core: from raw web text to a Hugging Face model.

`__main__.py` lists the commands and the function behind each one. Every command is a function in one of the packages.
"""

import logging
import sys
import warnings

__version__ = "0.2.0"

# `check environment` runs on older Pythons too, and reports their version as a problem.
if sys.version_info < (3, 11) and sys.argv[1:3] != ["check", "environment"]:
    sys.stderr.write(
        f"error: {sys.executable} is Python {'.'.join(map(str, sys.version_info[:2]))}, and this project needs 3.11 to "
        "3.13; start the command with the .venv/bin/python that bash tools/prepare_environment.sh makes\n"
    )
    sys.exit(69)

# megatron.core and torch.distributed repeat these warnings a dozen times per run, and a user cannot act on them:
# deprecated and experimental names, the absence of Transformer Engine and Apex, reading a checkpoint in a single
# process, and escapes in docstrings. All other warnings of theirs are shown.
_IGNORED_WARNINGS = (
    r"(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    r"\w+ is experimental and still under active development",
    r"The \.grad attribute of a Tensor that is not a leaf",
    "torch.distributed is disabled, unavailable or uninitialized",
)
_MODULES = r"megatron\.core|torch\.distributed"
warnings.filterwarnings("ignore", category=FutureWarning, module=_MODULES)
warnings.filterwarnings("ignore", message="|".join(_IGNORED_WARNINGS), module=_MODULES)
warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*/megatron/core/")  # the compiler passes a path
# These log warnings to developers of megatron.core only, about GPTModel, ModuleSpec and full_param_layout.
for _name in ("models.gpt.gpt_model", "transformer.transformer_layer", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)
