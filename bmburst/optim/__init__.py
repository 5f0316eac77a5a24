"""AdamW on BMTrain's ZeRO shards, and its configuration. BMTrain is imported with `AdamW`, not with this package."""

from typing import Any

from bmburst import public_name

__all__ = ["AdamW", "OptimizerConfig", "build_optimizer"]

_HOMES = {"adamw": ("AdamW", "build_optimizer"), "config": ("OptimizerConfig",)}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    return public_name(__name__, name, _HOMES, over_bmtrain="adamw")
