"""bmburst: exact training on sequences longer than one GPU holds, with BurstAttention on BMTrain.

Names are imported when they are first used: the command line's help needs no torch, and what needs BMTrain must not
import it before the runtime is in place.
"""

from typing import TYPE_CHECKING, Any

from bmburst.lazy import public_name

if TYPE_CHECKING:
    from bmburst.attention.api import burst_attention
    from bmburst.attention.compat import OpBurstAttn, OpBurstAttnStrip, burst_attn_func, burst_attn_func_striped
    from bmburst.attention.kept import empty_cache
    from bmburst.attention.module import BurstAttention
    from bmburst.comm.groups import communicator
    from bmburst.errors import UserError
    from bmburst.mask import BlockSparse, Causal, Documents, Full, Mask, PrefixLM, SlidingWindow
    from bmburst.mesh import Mesh, MeshShape
    from bmburst.runtime import start
    from bmburst.sequence import SequenceShard, ShardedBatch, shard, unshard

__version__ = "0.1.0"

__all__ = [
    "BlockSparse",
    "BurstAttention",
    "Causal",
    "Documents",
    "Full",
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
    "BlockSparse": "mask",
    "BurstAttention": "attention.module",
    "Causal": "mask",
    "Documents": "mask",
    "Full": "mask",
    "Mask": "mask",
    "Mesh": "mesh",
    "MeshShape": "mesh",
    "OpBurstAttn": "attention.compat",
    "OpBurstAttnStrip": "attention.compat",
    "PrefixLM": "mask",
    "SequenceShard": "sequence",
    "ShardedBatch": "sequence",
    "SlidingWindow": "mask",
    "UserError": "errors",
    "burst_attention": "attention.api",
    "burst_attn_func": "attention.compat",
    "burst_attn_func_striped": "attention.compat",
    "communicator": "comm.groups",
    "empty_cache": "attention.kept",
    "shard": "sequence",
    "start": "runtime",
    "unshard": "sequence",
}


def __getattr__(name: str) -> Any:
    """Import a public name from where it lives."""
    return public_name(__name__, name, _HOMES, over_bmtrain="attention.module")


def __dir__() -> list[str]:
    """Show the public names to completion."""
    return sorted({*globals(), *__all__})
