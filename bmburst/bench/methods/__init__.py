"""Every method that the suite can measure, by name, in the order in which they are measured."""

from bmburst.bench.methods.allgather_kv import AllGatherKV
from bmburst.bench.methods.local import LocalKernel
from bmburst.bench.methods.method import Attend, Method, Setting
from bmburst.bench.methods.one_gpu import OneGpu
from bmburst.bench.methods.ours import Ours, ours_on
from bmburst.bench.methods.packages import BurstAttentionPackage, Yunchang
from bmburst.bench.methods.ring_flash_attn import RingFlashAttention, RingFlashAttentionLlama3
from bmburst.bench.methods.ring_li import RingLi
from bmburst.bench.methods.tensor_parallel import TensorParallelV1, TensorParallelV3
from bmburst.bench.methods.ulysses import Ulysses

__all__ = ["Attend", "LocalKernel", "Method", "Ours", "Setting", "all_methods"]


def all_methods(device: str) -> dict[str, Method]:
    """Return the methods by name: ours as it chooses itself, the nearest peers, ours in every way, the other peers.

    Args:
        device: "cuda" or "cpu".
    """
    first, *others = ours_on(device)
    peers = (
        AllGatherKV(),
        Yunchang(),
        BurstAttentionPackage(),
        TensorParallelV1(),
        TensorParallelV3(),
        RingLi(),
    )
    listed = (OneGpu(), first, Ulysses(), RingFlashAttention(), RingFlashAttentionLlama3(), *others, *peers)
    return {method.name: method for method in listed}
