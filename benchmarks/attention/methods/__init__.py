"""The methods that the attention benchmark measures, by name, in the order in which they run."""

from benchmarks.attention.methods.kernel import LocalKernel
from benchmarks.attention.methods.method import Attend, Method, OneGpu, Setting
from benchmarks.attention.methods.ours import Ours, ours_on
from benchmarks.attention.methods.packages import (
    BurstAttentionPackage,
    RingFlashAttention,
    RingFlashAttentionLlama3,
    Yunchang,
)
from benchmarks.attention.methods.peers import AllGatherKV, RingLi, TensorParallelV1, TensorParallelV3, Ulysses

__all__ = ["Attend", "LocalKernel", "Method", "OneGpu", "Ours", "Setting", "all_methods"]


def all_methods(device: str) -> dict[str, Method]:
    """Return the methods by name: bmburst with automatic choices, close peers, all bmburst variants, other peers.

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
