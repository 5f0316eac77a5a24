"""bmburst: exact training on sequences longer than one GPU holds, with BurstAttention on BMTrain."""

from typing import Any

from bmburst.attention.api import burst_attention
from bmburst.attention.compat import OpBurstAttn, burst_attn_func, burst_attn_func_striped
from bmburst.comm.groups import communicator
from bmburst.errors import UserError
from bmburst.mesh import Mesh, MeshShape
from bmburst.shard import SequenceShard, ShardedBatch, shard, unshard

__version__ = "0.1.0"

__all__ = [
    "BurstAttention",
    "Mesh",
    "MeshShape",
    "OpBurstAttn",
    "SequenceShard",
    "ShardedBatch",
    "UserError",
    "burst_attention",
    "burst_attn_func",
    "burst_attn_func_striped",
    "communicator",
    "shard",
    "start",
    "unshard",
]


def __getattr__(name: str) -> Any:
    """Import what needs BMTrain when it is asked for: the host runtime must be in place before `import bmtrain`."""
    if name == "BurstAttention":
        from bmburst.attention.module import BurstAttention

        return BurstAttention
    if name == "start":
        from bmburst.runtime import start

        return start
    raise AttributeError(f"module 'bmburst' has no attribute {name!r}")
