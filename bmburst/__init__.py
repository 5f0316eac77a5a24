"""bmburst: exact training on sequences longer than one GPU holds, with BurstAttention on BMTrain.

Names are imported on first use: the help of the command line needs no torch, and BMTrain must not be imported before
the runtime is set up.
"""

from typing import TYPE_CHECKING, Any

from bmburst.lazy import keep_moved_modules, public_name

if TYPE_CHECKING:
    from bmburst.attention.api import (
        OpBurstAttn,
        OpBurstAttnStrip,
        burst_attention,
        burst_attn_func,
        burst_attn_func_striped,
        empty_cache,
    )
    from bmburst.attention.module import BurstAttention
    from bmburst.comm.groups import communicator
    from bmburst.errors import UserError
    from bmburst.inference.generator import Generator
    from bmburst.mesh import Mesh
    from bmburst.runtime import start
    from bmburst.schedule.documents import Documents, PrefixLM
    from bmburst.schedule.mask import BlockSparse, Causal, Full, Mask, SlidingWindow
    from bmburst.schedule.parallelism import MeshShape
    from bmburst.sequence import SequenceShard, ShardedBatch, shard, unshard

__version__ = "0.1.0"

__all__ = [
    "BlockSparse",
    "BurstAttention",
    "Causal",
    "Documents",
    "Full",
    "Generator",
    "Mask",
    "Mesh",
    "MeshShape",
    "OpBurstAttn",
    "OpBurstAttnStrip",
    "PrefixLM",
    "SequenceShard",
    "ShardedBatch",
    "SlidingWindow",
    "UserError",
    "burst_attention",
    "burst_attn_func",
    "burst_attn_func_striped",
    "communicator",
    "empty_cache",
    "shard",
    "start",
    "unshard",
]

_HOMES = {
    "BlockSparse": "schedule.mask",
    "BurstAttention": "attention.module",
    "Causal": "schedule.mask",
    "Documents": "schedule.documents",
    "Full": "schedule.mask",
    "Generator": "inference.generator",
    "Mask": "schedule.mask",
    "Mesh": "mesh",
    "MeshShape": "schedule.parallelism",
    "OpBurstAttn": "attention.api",
    "PrefixLM": "schedule.documents",
    "OpBurstAttnStrip": "attention.api",
    "SequenceShard": "sequence",
    "ShardedBatch": "sequence",
    "SlidingWindow": "schedule.mask",
    "UserError": "errors",
    "burst_attention": "attention.api",
    "burst_attn_func": "attention.api",
    "burst_attn_func_striped": "attention.api",
    "communicator": "comm.groups",
    "empty_cache": "attention.api",
    "shard": "sequence",
    "start": "runtime",
    "unshard": "sequence",
}


keep_moved_modules()


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    return public_name(__name__, name, _HOMES, over_bmtrain="attention.module")


def __dir__() -> list[str]:
    """Show the public names to completion."""
    return sorted({*globals(), *__all__})
