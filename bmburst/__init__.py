"""bmburst: exact training on sequences longer than one GPU holds, with BurstAttention on BMTrain.

Names are imported on first use: the help of the command line needs no torch, and BMTrain must not be imported before
the runtime is set up.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bmburst.attention.api import (
        OpBurstAttn,
        OpBurstAttnStrip,
        burst_attention,
        burst_attn_func,
        burst_attn_func_striped,
        empty_cache,
    )
    from bmburst.attention.module import BurstAttention as BurstAttention
    from bmburst.comm.groups import communicator
    from bmburst.errors import UserError
    from bmburst.inference.generator import Generator
    from bmburst.launch.start import start
    from bmburst.linear.api import burst_causal_conv, burst_linear_attention, burst_scan, burst_ssd
    from bmburst.mesh import Mesh
    from bmburst.schedule.documents import Documents, PrefixLM
    from bmburst.schedule.mask import BlockSparse, Causal, Full, Mask, SlidingWindow
    from bmburst.schedule.parallelism import MeshShape
    from bmburst.schedule.tree import Tree
    from bmburst.sequence import SequenceShard, ShardedBatch, shard, unshard
    from bmburst.sequence.packed_tree import PackedTree, pack_tree

__version__ = "0.1.0"

# What `from bmburst import *` imports. BurstAttention needs BMTrain, so a program asks for it by name.
__all__ = [
    "BlockSparse",
    "Causal",
    "Documents",
    "Full",
    "Generator",
    "Mask",
    "Mesh",
    "MeshShape",
    "OpBurstAttn",
    "OpBurstAttnStrip",
    "PackedTree",
    "PrefixLM",
    "SequenceShard",
    "ShardedBatch",
    "SlidingWindow",
    "Tree",
    "UserError",
    "burst_attention",
    "burst_attn_func",
    "burst_attn_func_striped",
    "burst_causal_conv",
    "burst_linear_attention",
    "burst_scan",
    "burst_ssd",
    "communicator",
    "empty_cache",
    "pack_tree",
    "shard",
    "start",
    "unshard",
]

_HOMES = {
    "attention.api": (
        "OpBurstAttn",
        "OpBurstAttnStrip",
        "burst_attention",
        "burst_attn_func",
        "burst_attn_func_striped",
        "empty_cache",
    ),
    "attention.module": ("BurstAttention",),
    "comm.groups": ("communicator",),
    "errors": ("UserError",),
    "inference.generator": ("Generator",),
    "launch.start": ("start",),
    "linear.api": ("burst_causal_conv", "burst_linear_attention", "burst_scan", "burst_ssd"),
    "mesh": ("Mesh",),
    "schedule.documents": ("Documents", "PrefixLM"),
    "schedule.mask": ("BlockSparse", "Causal", "Full", "Mask", "SlidingWindow"),
    "schedule.parallelism": ("MeshShape",),
    "schedule.tree": ("Tree",),
    "sequence": ("SequenceShard", "ShardedBatch", "shard", "unshard"),
    "sequence.packed_tree": ("PackedTree", "pack_tree"),
}


def public_name(package: str, name: str, homes: Mapping[str, Sequence[str]], *, over_bmtrain: str | None = None) -> Any:
    """Return the object of a public name, for the package's `__getattr__`.

    Args:
        package: The package's name.
        name: The name.
        homes: Public names by the module of the package that defines them.
        over_bmtrain: The module that imports BMTrain at its top, if there is one.

    Raises:
        AttributeError: The package has no such name.
        UserError: `over_bmtrain` defines the name and cannot be imported.
    """
    home = next((module for module, names in homes.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module '{package}' has no attribute {name!r}")
    try:
        module = import_module(f"{package}.{home}")
    except ImportError as error:
        if home != over_bmtrain:
            raise
        from bmburst.errors import needs_bmtrain

        raise needs_bmtrain(f"{package}.{name}") from error
    return getattr(module, name)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    return public_name(__name__, name, _HOMES, over_bmtrain="attention.module")


def __dir__() -> list[str]:
    """Show the public names to completion."""
    return sorted(name for names in _HOMES.values() for name in names)
