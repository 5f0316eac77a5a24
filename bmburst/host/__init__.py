"""The host runtime: runs unmodified BMTrain 1.0.1 on CPUs, with gloo instead of NCCL.

Importing this package does not import torch, so that the launcher can use `stores` before its ranks start.
"""

from typing import TYPE_CHECKING, Any

from bmburst import public_name

if TYPE_CHECKING:
    from bmburst.host.patches import install, is_installed, silence_deprecations, wrap_communication

__all__ = ["install", "is_installed", "silence_deprecations", "wrap_communication"]


def __getattr__(name: str) -> Any:
    return public_name(__name__, name, {"patches": __all__})
