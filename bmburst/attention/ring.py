"""Ring attention, forward and backward: blocks go round one ring or a double ring, and their gradients follow.

A double ring has a ring inside each node and one between nodes; a ring is a double ring of one node. It holds at most
five blocks of tensors: the own block, the one that entered the node and is being sent on, the visiting one, and one in
flight in each ring. Backward also holds at most five blocks of gradients: the shares of a step, the previous shares
that are still being sent, one in flight in each ring, and the sum of the own node. This does not grow with the number
of nodes or ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall, SequenceCall
from bmburst.attention.local import add_tiles, tile_forward
from bmburst.comm.communicator import BlockMover, CompletedTransfer, Transfer
from bmburst.comm.transports import RingGroups
from bmburst.schedule.parallelism import RingTensors
from bmburst.schedule.ring_schedule import RingOrder, Step
from bmburst_ops.flash import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.kernel import deliver_gradients, deliver_partial
from bmburst_ops.merge import accumulation_dtype, add_, merge_partials_

Tensors = tuple[Tensor, ...]


def ring_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, into: Partial | None = None) -> Partial:
    """Return attention of this rank's queries over the whole sequence: keys and values travel (arXiv:2310.01889).

    The output is in q's dtype, the log-sum-exp in fp32 or wider. Padding rows give zero and `-inf`.

    Args:
        call: The attention.
        q: `[batch, tokens, heads, head_dim]`.
        k: `[batch, tokens, kv_heads, head_dim]`.
        v: `[batch, tokens, kv_heads, value_dim]`.
        into: Where to write the results, as `Kernel.forward`. Default: new memory.
    """
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    for step, (keys, values) in visiting_kv(call, k, v):
        for tile in step.tiles:
            rows = tile.queries.slice
            part = tile_forward(call, tile, q, keys, values)
            merge_partials_(out[:, rows], lse[:, :, rows], *part)
    return deliver_partial(Partial(out.to(q.dtype), lse), into)


def ring_backward(call: AttentionCall, given: BackwardInputs, into: Gradients | None = None) -> Gradients:
    """Return the gradients of this rank's q, k and v, accumulated in fp32 or wider; `into` as above.

    The strategy decides what travels: K and V, followed by dK and dV, or Q, dO, log-sum-exp and delta, followed by dQ
    (BurstAttention, arXiv:2403.09347, algorithm 2).
    """
    q, k, v = given.q, given.k, given.v

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=accumulation_dtype(q.dtype), memory_format=torch.contiguous_format)

    if call.strategy.ring_tensors == "kv":
        grad_q = zeros(q)

        def keys_visit(step: Step, received: Tensors) -> Tensors:
            sums = Gradients(grad_q, zeros(k), zeros(v))
            add_tiles(call, step.tiles, given._replace(k=received[0], v=received[1]), sums)
            return sums.k, sums.v

        return deliver_gradients(Gradients(grad_q, *carry_home(call, "kv", (k, v), keys_visit)), into)

    grad_k, grad_v = zeros(k), zeros(v)

    def queries_visit(step: Step, received: Tensors) -> Tensors:
        queries, grad_out, lse, delta = received
        sums = Gradients(zeros(q), grad_k, grad_v)
        add_tiles(call, step.tiles, BackwardInputs(grad_out, queries, k, v, lse, delta), sums)
        return (sums.q,)

    (grad_q,) = carry_home(call, "q", (q, given.grad_out, given.lse, given.delta), queries_visit)
    return deliver_gradients(Gradients(grad_q, grad_k, grad_v), into)


def visiting_kv(call: SequenceCall, k: Tensor, v: Tensor) -> Iterator[tuple[Step, Tensors]]:
    """Yield each step of a ring with the keys and values that visit this rank, beginning with its own."""
    schedule = call.schedule("kv", returning=False)
    return zip(schedule.steps, ring_visits(call.rings, schedule.ring_order, k, v), strict=True)


def carry_home(
    call: SequenceCall, ring_tensors: RingTensors, own: Tensors, work: Callable[[Step, Tensors], Tensors]
) -> Tensors:
    """Send own tensors round the ring and return their gradients, summed over all ranks.

    Args:
        call: The attention.
        ring_tensors: Whether keys and values ("kv") or queries ("q") travel.
        own: This rank's tensors.
        work: Maps a step and the visiting tensors to this rank's share of their gradients.
    """
    schedule = call.schedule(ring_tensors, returning=True)
    steps = iter(schedule.steps)
    return ring_carry_home(call.rings, schedule.ring_order, own, lambda held: work(next(steps), held))


def ring_visits(groups: RingGroups, ring_order: RingOrder, *own: Tensor) -> Iterator[Tensors]:
    """Yield the tensors of each step of `ring_order`, beginning with this rank's own.

    While the caller works on a step, the next hop inside the node is in flight. During a whole window, the hop between
    nodes for the next window is in flight.
    """
    windows = ring_order.windows
    held, far = own, _hop(groups.inter, own, 0)
    for window, following in zip_longest(windows, windows[1:]):
        base = own
        if window.nodes:
            base = far.wait()
            held = _hop(groups.intra, base, window.stops[0]).wait()  # at once, unless a mask leaves out the first stop
        if following is not None and following.nodes:
            far = _hop(groups.inter, base, following.nodes - window.nodes)
        for hop in window.hops:
            near = _hop(groups.intra, held, hop)
            yield held
            held = near.wait()
        if following is None or following.nodes:
            yield held
        else:  # the next window is of the own node: own tensors go on to its first stop
            near = _hop(groups.intra, own, following.stops[0])
            yield held
            held = near.wait()


def ring_carry_home(
    groups: RingGroups, ring_order: RingOrder, own: Tensors, work: Callable[[Tensors], Tensors]
) -> Tensors:
    """Send own tensors round a ring or a double ring and return their gradients, summed over all ranks.

    Gradients follow one step behind. They leave a rank while the next rank still computes its share, which is added
    when they arrive. The sum of a node travels while the next node computes its own sum; then both are added and go on.
    """
    windows = ring_order.windows
    visiting = ring_visits(groups, ring_order, *own)
    far: Transfer | None = None
    kept: Transfer | None = None
    for window, following in zip_longest(windows, windows[1:]):
        shares = _collect_shares(groups.intra, window.hops, visiting, work)
        place = window.stops[-1]
        if following is not None and not window.nodes:  # gradients of the own node: one hop to their owners is left
            kept = _hop(groups.intra, shares, -place)
            continue
        if kept is not None:
            kept.wait()  # it arrived long ago; waiting frees the sent tensors
        shares = _hop(groups.intra, shares, ring_order.exit - place).wait()  # at once, unless a mask leaves out stops
        if far is not None:
            _add_all(shares, far.wait())
        far = _hop(groups.inter, shares, (0 if following is None else following.nodes) - window.nodes)
        del shares
    assert far is not None  # the last window sent it
    home = _hop(groups.intra, far.wait(), -ring_order.exit).wait()
    if kept is not None:
        _add_all(home, kept.wait())
    return home


def _collect_shares(
    mover: BlockMover, hops: Sequence[int], visiting: Iterator[Tensors], work: Callable[[Tensors], Tensors]
) -> Tensors:
    """Sum shares along the hops of a ring; return the sum that ends at this rank.

    Gradients leave a rank while the next rank still computes its share, which is added when they arrive.
    """
    returning: Transfer | None = None
    for hop in (*hops, None):
        shares = work(next(visiting))
        if returning is not None:
            _add_all(shares, returning.wait())
            returning = None  # free the received tensors before the next hop allocates
        if hop is not None:
            returning = mover.ring(*shares, shift=hop)
    return shares


def _add_all(shares: Tensors, arrived: Tensors) -> None:
    """Add the received gradients to this rank's shares, in place."""
    for share, other in zip(shares, arrived, strict=True):
        add_(share, other)


def _hop(mover: BlockMover, tensors: Tensors, shift: int) -> Transfer:
    return mover.ring(*tensors, shift=shift) if shift % mover.size else CompletedTransfer(tensors)
