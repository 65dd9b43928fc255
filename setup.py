"""Package metadata. Tool settings (ruff, mypy, pytest) are in pyproject.toml, tested versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """Return the version in megatron_neobert/__init__.py. The package cannot be imported before it is installed."""
    source = (HERE / "megatron_neobert" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if match is None:
        raise ValueError('megatron_neobert/__init__.py has no line of the form __version__ = "1.2.3"')
    return match.group(1)


REQUIREMENTS = [
    "torch>=2.11",  # packed attention with a scale
    # The exact versions that runtime/megatron_patches.py supports. 0.16.1 is the last version for Python 3.11.
    "megatron-core==0.16.1; python_version < '3.12'",
    "megatron-core==0.19.2; python_version >= '3.12'",
    "msgspec>=0.19",
    "numpy>=1.26",
    "pyarrow>=16",
    "orjson>=3.9",
    "backports.zstd>=1",
    "fsspec>=2023.6",
    "tokenizers>=0.22",
    "transformers>=5.3",  # loads an EuroBERT export without remote code
    "huggingface_hub>=1",
    "jinja2>=3.1",  # model card template
    "safetensors>=0.4.3",
    "PyYAML>=6",
    "argcomplete>=3",  # shell completion of `neobert`
    "tensorboard>=2.16",
    "tqdm>=4.66",
    "matplotlib>=3.8",  # figures of runs and evaluations
    "packaging>=24.2",  # megatron.core imports it
    "psutil>=5.9",  # used by the launcher; without it, megatron.core's checkpoint writers hang
]

EXTRAS = {
    # "apex" is not listed, because the PyPI package of this name is an unrelated project. NVIDIA's Apex is optional.
    "gpu": [
        "transformer-engine[pytorch]>=2.9,<2.12; python_version < '3.12'",  # as megatron-core 0.16.1 declares
        "transformer-engine[pytorch]>=2.9,<2.21; python_version >= '3.12'",  # 0.19.2 declares none; tested: 2.20.2
    ],
    # Used only while their ids equal those of the tokenizers library. Review a new version before changing these.
    "fast": ["nanotoken==0.1.0"],
    "sentencepiece": ["sentencepiece>=0.2"],
    "warc": ["fastwarc>=2", "resiliparse>=2"],
    "s3": ["s3fs>=2023.6"],  # needs the same release of fsspec; installs aiohttp, which http:// needs
    "dali": ["nvidia-dali-cuda130>=2"],
    "ray": ["ray>=2.59"],
    "wandb": ["wandb>=0.18"],
    "eval": [
        "mteb>=2.26,<3; python_version >= '3.11'",  # does not support Python 3.10
        "sentence-transformers>=6",
        "datasets>=4",
        "scikit-learn>=1.6",
        "scipy>=1.13",
        "seqeval>=1.2",
        "accelerate>=1",  # transformers' Trainer
    ],
    "onnx": ["onnx>=1.18", "onnxscript>=0.5", "onnxruntime>=1.22"],  # neobert export-onnx
    "benchmark": ["datatrove>=0.9", "datasets>=4"],  # benchmarks/benchmark_preprocessing.py compares with them
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10"],  # make docs
    "dev": [
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6.130",
        "ruff>=0.12",
        "mypy>=1.15",
        "types-PyYAML",
        "peft>=0.17",
        "einops>=0.8",  # imported by Transformer Engine, which tests run with an emulated extension
        "moto[s3]>=5",  # S3 server for tests; needs the next two packages
        "flask>=3",
        "flask-cors>=6",
    ],
}
# The tests also use these extras.
for optional in ("fast", "sentencepiece", "warc", "s3", "ray", "wandb", "eval", "onnx", "docs"):
    EXTRAS["dev"] += EXTRAS[optional]

setup(
    name="megatron-neobert",
    version=read_version(),
    description="Pre-training of NeoBERT encoders on Megatron-Core: raw web shards in, a Hugging Face model out",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["megatron_neobert", "megatron_neobert.*", "checkpoint_conversion"]),
    package_data={
        "megatron_neobert": ["configs/*.yaml", "configs/*/*.yaml"],  # a link to examples/configs
        "checkpoint_conversion": ["model_card_template.md"],
    },
    entry_points={"console_scripts": ["neobert = megatron_neobert.__main__:start"]},
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
