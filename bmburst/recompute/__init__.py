"""Activation checkpointing that saves attention's results: `checkpoint`, recompute policies, offload to the host.

Names are imported on first use, because the planner uses `bmburst.recompute.policy` without torch.
"""

from typing import TYPE_CHECKING, Any

from bmburst import public_name

if TYPE_CHECKING:
    from bmburst.recompute.checkpointing import PrefixRecompute, checkpoint, is_recomputing, keep
    from bmburst.recompute.policy import POLICIES, Policy

__all__ = ["POLICIES", "Policy", "PrefixRecompute", "checkpoint", "is_recomputing", "keep"]

_HOMES = {
    "checkpointing": ("PrefixRecompute", "checkpoint", "is_recomputing", "keep"),
    "policy": ("POLICIES", "Policy"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    return public_name(__name__, name, _HOMES)
