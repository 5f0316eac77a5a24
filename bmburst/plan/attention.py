"""Seconds of one layer's attention on a rank: kernels, what joins partial results, and exposed communication.

What moves follows the executors in `bmburst/attention`; kernels run at the machine's rates, transfers beside them are
hidden as far as there is something to hide behind. A transport's share of its time is never hidden.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from bmburst.plan.candidates import Candidate
from bmburst.plan.counts import attention_flops
from bmburst.plan.sizes import Sizes, sizes
from bmburst.plan.traffic import Pipe, between, inside, mixed
from bmburst.schedule.hardware import Hardware
from bmburst_ops.constants import ATTENTION_BACKWARD

_TILE = 128  # queries of a kernel's tile


class Pass(NamedTuple):
    """Seconds of a forward or a backward pass.

    Attributes:
        kernel: The kernel alone, on this rank's share of the FLOPs.
        joining: Smaller tiles, more calls, merges, sums and copies.
        exposed: Transfers that nothing hides.
    """

    kernel: float
    joining: float
    exposed: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.kernel + self.joining + self.exposed


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One layer's attention."""

    forward: Pass
    backward: Pass


def attention_cost(candidate: Candidate, hardware: Hardware) -> AttentionCost:
    """Return the seconds of one layer and one pass of a micro batch."""
    return AttentionCost(*(_pass(candidate, hardware, backward=backward) for backward in (False, True)))


def beginning_seconds(candidate: Candidate, hardware: Hardware, kept: float) -> float:
    """Return the seconds forward of the tokens before those whose attention is kept: `bmburst.attention.beginning`.

    Where no rank has all of these tokens, the last one works on as much as twice the mean.
    """
    task = candidate.task
    tokens = max(candidate.sequence, round((1 - kept) * task.sequence))
    cost = attention_cost(replace(candidate, task=replace(task, sequence=tokens)), hardware).forward
    return cost.total + (1 - 1 / candidate.groups) * cost.kernel


def _pass(candidate: Candidate, hardware: Hardware, *, backward: bool) -> Pass:
    task, own = candidate.task, sizes(candidate)
    flops = task.micro_batch * attention_flops(task.model, task.sequence) / candidate.sequence / candidate.tensor
    rate = hardware.attention_backward if backward else hardware.attention_forward
    whole = flops * (ATTENTION_BACKWARD if backward else 1.0) / rate
    rows = candidate.tokens * candidate.heads  # of a kernel call's queries
    kernel = whole * (1 + hardware.attention_half_rows / max(1, rows)) + hardware.attention_call
    joining = (own.calls(backward=backward) - 1) * hardware.attention_call
    if candidate.groups == 1:
        # When a call ends, its longest tile runs on one multiprocessor, and the others wait; rectangles have none.
        tile = 4.0 * _TILE * rows * task.model.head_dim * (ATTENTION_BACKWARD if backward else 1.0)
        tail = hardware.attention_tail * tile * hardware.multiprocessors / rate
        joining += (own.calls(backward=backward) - 1) * min(tail, whole)
    exposed = 0.0
    if candidate.heads > 1:
        exposed += _heads(candidate, hardware, own, kernel, backward=backward)
    if candidate.groups > 1:
        joining += hardware.cut_loss * kernel
        outer = _gather if candidate.outer == "gather" else _ring
        more_joining, more_exposed = outer(candidate, hardware, own, kernel, backward=backward)
        joining, exposed = joining + more_joining, exposed + more_exposed
    return Pass(kernel, joining, exposed)


def _heads(candidate: Candidate, hardware: Hardware, own: Sizes, kernel: float, *, backward: bool) -> float:
    """The first unit's way in and the last one's way out are not hidden; the rest is, behind the other units."""
    degree = candidate.heads
    pipe = mixed(hardware, candidate, degree, candidate.sequence_ranks_per_node)
    away = (degree - 1) / degree
    inward, outward = own.head_bytes(backward=backward)
    inward, outward = inward * away, outward * away
    units = own.unit_shares(backward=backward)
    if len(units) == 1:
        return pipe.seconds(inward) + pipe.seconds(outward)
    first, last = units[0], units[-1]
    beside = inward * (1 - first) + outward * (1 - last)
    return (
        pipe.seconds(inward * first)
        + pipe.seconds(outward * last)
        + pipe.exposed(beside, kernel)
        + (len(units) - 2) * pipe.latency * pipe.share
    )


def _gather(
    candidate: Candidate, hardware: Hardware, own: Sizes, kernel: float, *, backward: bool
) -> tuple[float, float]:
    groups, task = candidate.groups, candidate.task
    near = max(1, candidate.sequence_ranks_per_node // candidate.heads)
    pipe = mixed(hardware, candidate, groups, near)
    moved = own.gather_bytes
    units = own.gather_units
    q, k = own.q / task.itemsize, own.exchanged_k / task.itemsize  # numbers
    alone = kernel / groups  # attention to own keys: what hides the first unit's way in
    exposed = pipe.exposed(moved, kernel - (kernel - alone) / units) + 2 * pipe.latency
    if not backward:
        return hardware.memory_seconds(22.0 * q + 8.0 * k), exposed
    exposed += pipe.exposed(moved, kernel * (1 - 1 / units)) + (moved / units / pipe.bandwidth if units > 1 else 0.0)
    key_parts = 2 * ((groups + 1) / 2 + 1)  # of K and of V: a key is seen by half of the groups
    return hardware.memory_seconds(q * 2.0 * 4 + k * (8.0 + 2.0 * key_parts)), exposed


def _ring(
    candidate: Candidate, hardware: Hardware, own: Sizes, kernel: float, *, backward: bool
) -> tuple[float, float]:
    groups, itemsize = candidate.groups, candidate.task.itemsize
    q, k = own.q / itemsize, own.exchanged_k / itemsize  # numbers
    if not backward:
        step, sums = 8.0 * k + 10.0 * q, 0.0
        visiting, returning = own.ring_forward, 0.0
    elif own.travellers == "q":
        step, sums = 42.0 * q + 20.0 * k, 4.0 * (q + 2 * k)
        visiting, returning = own.ring_backward
    else:
        step, sums = 68.0 * k + 10.0 * q, 4.0 * (q + 2 * k)
        visiting, returning = own.ring_backward
    joining = hardware.memory_seconds(groups * step + sums)
    near = max(1, candidate.sequence_ranks_per_node // candidate.heads)
    behind = kernel / groups
    home = inside(hardware, candidate.transport)
    if candidate.sequence_nodes == 1:
        return joining, _hops(home, visiting, returning, groups, behind)
    if candidate.outer == "ring":
        crossing = candidate.heads * candidate.tensor * max(1, candidate.task.gpus_per_node / _node_ranks(candidate))
        return joining, _hops(between(hardware, candidate, crossing), visiting, returning, groups, behind)
    nodes = groups // near
    away = between(hardware, candidate, candidate.task.gpus_per_node)
    window = behind * near
    exposed = nodes * (near - 1) * home.exposed(visiting + returning, behind)
    exposed += (nodes - 1) * away.exposed(visiting + returning, window)
    if returning:
        exposed += away.seconds(returning) + home.seconds(returning)
    return joining, exposed


def _hops(pipe: Pipe, visiting: float, returning: float, groups: int, behind: float) -> float:
    """Visitors make groups - 1 hops beside kernels; what follows them makes one more, at the end, beside nothing."""
    exposed = (groups - 1) * pipe.exposed(visiting + returning, behind)
    return exposed + pipe.seconds(returning)


def _node_ranks(candidate: Candidate) -> int:
    return min(candidate.task.gpus_per_node, candidate.sequence * candidate.tensor)
