"""The ring, forward and backward: blocks visit, tiles are computed, gradients follow one step behind."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bmburst.attention import double_ring, single_ring
from bmburst.attention.call import AttentionCall
from bmburst.attention.local import add_tiles, tile_forward
from bmburst.attention.single_ring import Blocks
from bmburst.schedule.ring_schedule import Step
from bmburst_ops.flash import Given, Gradients, Kernel, Partial
from bmburst_ops.merge import accumulation_dtype, merge_partials_


def ring_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Return attention of this rank's queries over the whole sequence: keys and values travel (arXiv:2310.01889).

    The output is in q's dtype, the log-sum-exp in fp32 or wider. Padding rows give zero and `-inf`.
    """
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    for step, (keys, values) in _visiting(call, k, v):
        for tile in step.tiles:
            rows = tile.queries.slice
            part = tile_forward(call, tile, q, keys, values)
            merge_partials_(out[:, rows], lse[:, :, rows], *part)
    return Partial(out.to(q.dtype), lse)


def ring_backward(call: AttentionCall, kernel: Kernel, given: Given) -> Gradients:
    """Return the gradients of this rank's q, k and v, accumulated in fp32 or wider.

    What travels is decided by bytes: K and V with dK and dV behind them, or Q, dO, log-sum-exp and delta with dQ behind
    them (BurstAttention, arXiv:2403.09347, algorithm 2).
    """
    q, k, v = given.q, given.k, given.v

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=accumulation_dtype(q.dtype), memory_format=torch.contiguous_format)

    if call.strategy.travellers == "kv":
        grad_q = zeros(q)

        def keys_visit(step: Step, guests: Blocks) -> Blocks:
            sums = Gradients(grad_q, zeros(k), zeros(v))
            add_tiles(call, kernel, step.tiles, given._replace(k=guests[0], v=guests[1]), sums)
            return sums.k, sums.v

        return Gradients(grad_q, *_carry_home(call, (k, v), keys_visit))

    grad_k, grad_v = zeros(k), zeros(v)

    def queries_visit(step: Step, guests: Blocks) -> Blocks:
        queries, grad_out, lse, delta = guests
        sums = Gradients(zeros(q), grad_k, grad_v)
        add_tiles(call, kernel, step.tiles, Given(grad_out, queries, k, v, lse, delta), sums)
        return (sums.q,)

    (grad_q,) = _carry_home(call, (q, given.grad_out, given.lse, given.delta), queries_visit)
    return Gradients(grad_q, grad_k, grad_v)


def _visiting(call: AttentionCall, k: Tensor, v: Tensor) -> Iterator[tuple[Step, Blocks]]:
    """Yield each step with the keys and values that visit."""
    if call.levels is None:
        return single_ring.visits(call.comm, call.schedule("kv"), k, v)
    schedule = call.double_schedule("kv", returning=False)
    return zip(schedule.steps, double_ring.visits(call.levels, schedule.itinerary, k, v), strict=True)


def _carry_home(call: AttentionCall, guests: Blocks, work: Callable[[Step, Blocks], Blocks]) -> Blocks:
    """Let guests visit, and bring home what `work` gives for them."""
    if call.levels is None:
        return single_ring.carry_home(call.comm, call.schedule(call.strategy.travellers), guests, work)
    schedule = call.double_schedule(call.strategy.travellers, returning=True)
    steps = iter(schedule.steps)
    return double_ring.carry_home(call.levels, schedule.itinerary, guests, lambda held: work(next(steps), held))
