"""The ring, forward and backward: blocks visit, tiles are computed, gradients follow one step behind."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bmburst.attention import double_ring, single_ring
from bmburst.attention.call import AttentionCall
from bmburst.attention.single_ring import Blocks
from bmburst.attention.tile import tile_backward, tile_forward
from bmburst.schedule import Step
from bmburst_ops.flash import Given, Gradients, Kernel, Partial
from bmburst_ops.merge import accumulation_dtype, add_, merge_partials_


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
    grad_out, q, k, v, lse, delta = given
    dtype = accumulation_dtype(q.dtype)

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)

    grad_q, grad_k, grad_v = zeros(q), zeros(k), zeros(v)

    def keys_visit(step: Step, guests: Blocks) -> Blocks:
        guest_grads = zeros(k), zeros(v)
        keys, values = guests
        for tile in step.tiles:
            grads = tile_backward(call, kernel, tile, Given(grad_out, q, keys, values, lse, delta))
            add_(grad_q[:, tile.queries.slice], grads.q)
            add_(guest_grads[0][:, tile.keys.slice], grads.k)
            add_(guest_grads[1][:, tile.keys.slice], grads.v)
        return guest_grads

    def queries_visit(step: Step, guests: Blocks) -> Blocks:
        guest_grad = zeros(q)
        queries, grad_outs, statistic, deltas = guests
        for tile in step.tiles:
            grads = tile_backward(call, kernel, tile, Given(grad_outs, queries, k, v, statistic, deltas))
            add_(guest_grad[:, tile.queries.slice], grads.q)
            add_(grad_k[:, tile.keys.slice], grads.k)
            add_(grad_v[:, tile.keys.slice], grads.v)
        return (guest_grad,)

    if call.strategy.travellers == "kv":
        grad_k, grad_v = _carry_home(call, (k, v), keys_visit)
    else:
        (grad_q,) = _carry_home(call, (q, grad_out, lse, delta), queries_visit)
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
