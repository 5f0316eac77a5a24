"""Predicts the bytes of attention's buffers, without inputs and results, on one rank and for one layer.

The formulas are explained in the docstrings of `bmburst/attention/heads.py`, `gather.py` and `ring.py`. With the copy
engine transport, buffers that other ranks read or write ("boxes") are outside torch's allocator and are kept for the
next layer. Memory of kernels that run as CUDA graphs belongs to the graphs, and torch's peak does not include it.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from bmburst.plan.candidates import Candidate, Offload
from bmburst.plan.counts import WIDE
from bmburst.schedule.units import Sizes

_TURNS = 2  # double buffering: one buffer is filled while the other is read


class Buffers(NamedTuple):
    """Bytes of one pass.

    Attributes:
        results: In forward output and log-sum-exp; in backward gradients of queries, keys and values, and delta.
        kernel: Internal buffers of the kernel: sums in fp32.
        working: Partial results and blocks in transfer, in torch's allocator.
        boxes: Buffers that other ranks read or write.
    """

    results: float
    kernel: float
    working: float
    boxes: float


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes of one attention call beside its inputs and results, computed when they are first asked for.

    Attributes:
        candidate: The way to train, with the heads of one call.
    """

    candidate: Candidate

    @cached_property
    def forward(self) -> Buffers:
        """See `attention_buffers`."""
        return attention_buffers(self.candidate, backward=False)

    @cached_property
    def backward(self) -> Buffers:
        """See `attention_buffers`."""
        return attention_buffers(self.candidate, backward=True)

    @cached_property
    def outside(self) -> float:
        """Bytes of boxes outside torch's allocator, for the larger of both passes."""
        way = self.candidate
        if way.sequence == 1 or way.transport != "peer" or way.sequence_nodes > 1:
            return 0.0
        return max(self.forward.boxes, self.backward.boxes)

    @cached_property
    def in_graphs(self) -> float:
        """Bytes that CUDA graphs of one-tile kernels hold for internal buffers of the kernels."""
        own = self.candidate.sizes
        if not own.records_kernels(self.candidate.transport, self.candidate.sequence_nodes):
            return 0.0
        return _kernel(self.candidate, own, 1.0, backward=True)


def attention_memory(candidate: Candidate) -> AttentionMemory:
    """Return the memory of attention. Ways that differ in policy, ZeRO stage and offload alone share it."""
    return _of_attention(replace(candidate, recompute="none", layer=None, zero=3, offload=Offload.NOTHING))


_of_attention = lru_cache(maxsize=256)(AttentionMemory)


def attention_buffers(candidate: Candidate, *, backward: bool) -> Buffers:
    """Return the buffers of a forward or backward pass at its peak."""
    own = candidate.sizes
    if backward:
        keys = own.shapes.kv_bytes
        joined = keys / own.shapes.replicas if own.shapes.replicas > 1 else 0.0
        results = own.shapes.q_bytes + keys + joined + own.shapes.statistics_bytes
    else:
        results = own.shapes.out_bytes + own.shapes.statistics_bytes
    share, working, boxes = 1.0, 0.0, 0.0
    if candidate.ulysses_degree > 1:
        share, boxes = _heads(candidate, own, backward=backward)
    kernel = _kernel(candidate, own, share, backward=backward)
    if candidate.groups > 1:
        outer = _gather if candidate.outer == "gather" else _ring
        more, more_boxes = outer(own, share, backward=backward)
        working, boxes = working + more, boxes + more_boxes
    return Buffers(results, kernel, working, boxes)


def _kernel(candidate: Candidate, own: Sizes, share: float, *, backward: bool) -> float:
    """FlashAttention-4: statistics; in backward dQ in fp32, and with GQA also dK and dV."""
    if not backward:
        return own.shapes.statistics_bytes * share
    wide = WIDE / candidate.task.itemsize
    shared = own.shapes.kv_bytes * wide if own.shapes.own_heads > own.shapes.own_kv_heads else 0.0
    return (own.shapes.q_bytes * wide + shared + 2 * own.shapes.statistics_bytes) * share


def _heads(candidate: Candidate, own: Sizes, *, backward: bool) -> tuple[float, float]:
    """The largest unit; the inbox, and two outboxes of its results; see `bmburst/attention/heads.py`."""
    shares = own.unit_shares(backward=backward)
    inward, outward = own.head_bytes(backward=backward)
    turns = min(_TURNS, len(shares)) if candidate.transport == "peer" else 1
    return max(shares), inward + turns * outward * max(shares)


def _gather(own: Sizes, share: float, *, backward: bool) -> tuple[float, float]:
    """Two buffers and two outboxes of a unit, backward twice as many; see `bmburst/attention/gather.py`."""
    units = own.gather_units if own.shapes.degree == 1 else 1
    groups, turns, part = own.shapes.groups, min(_TURNS, units), share / units
    kv, q = own.shapes.kv_bytes * part, own.shapes.q_bytes * part
    working, boxes = turns * kv * (groups - 1), turns * kv
    if backward:
        return working + turns * kv * groups + 3 * q, boxes + turns * kv * (groups - 1)
    return working + own.shapes.out_bytes * part, boxes


def _ring(own: Sizes, share: float, *, backward: bool) -> tuple[float, float]:
    """The current and the incoming block, sums in fp32, results of a tile; see `bmburst/attention/ring.py`."""
    wide = WIDE / own.shapes.itemsize
    q, out, kv = (share * nbytes for nbytes in (own.shapes.q_bytes, own.shapes.out_bytes, own.shapes.kv_bytes))
    if not backward:
        return out * wide + out + 2 * kv, _TURNS * kv
    visiting, returning = (share * nbytes for nbytes in own.shapes.ring_bytes(own.strategy.ring_tensors))
    sums = (q + kv) * wide
    tile = q + kv
    return 2 * visiting + sums + 2 * returning + tile, _TURNS * max(visiting, returning)
