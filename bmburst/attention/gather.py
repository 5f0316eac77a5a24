"""Attention by gathering keys and values: a rank pulls those that its queries see, and attends to them in few tiles.

A rank attends to its own keys first, which hides the first pull. Heads are cut into units. While kernels work on one
unit, K and V of the next unit arrive, and dK and dV of the previous unit return to their owners. Each run of queries is
merged once, independent of the number of ranks.

dK and dV travel in the inputs' dtype. The kernel of each tile writes them directly into the outbox, each key of a rank
gets its gradient from one tile, and its owner sums all parts in fp32 or wider and rounds once. 16-bit kernels have
rounded already: fp32 parts would carry the same numbers at twice the bytes, with one more pass over them. Only kernels
that could give wider gradients (the reference) lose precision. In both cases each part is rounded once, in addition to
the final rounding that one device has too. Errors of parts are independent: where parts add up like random numbers,
the sum has about one more rounding error at any number of ranks, as in a ring.

Memory beside inputs and results, for batch B, S tokens over P ranks, head dimension D (of keys and values the mean),
units of G KV heads with R query heads in total, in elements of the inputs' dtype:

    forward: 2 buffers and 2 outboxes, each of K and V: 4 * B * S * G * D
    backward: that, and 2 outboxes and 2 sets of parts, each of dK and dV: up to 4 * B * (2 * S - S / P) * G * D;
        and parts of dQ: up to 3 * B * S / P * R * D under a causal or full mask

Under sparser masks, buffers and outboxes hold only the visible keys, and there are as many parts as ranks that see a
key. With a single unit there is one of each instead of two. Over the peer transport outboxes stay allocated for the
next call.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall, head_shapes_of
from bmburst.attention.local import local_backward, local_forward, tile_backward, tile_forward
from bmburst.comm.communicator import Transfer
from bmburst.comm.memory import tensor_in
from bmburst.schedule.gather_plan import GatherPlan, GradientSumPlan, make_gather_plan
from bmburst_ops.flash import BackwardInputs, Gradients, Partial
from bmburst_ops.flash.kernel import empty_gradients
from bmburst_ops.merge import merge_partials_, sum_parts

Pair = tuple[Tensor, Tensor]
"""A tensor of keys and one of values."""
_IN, _OUT = 2, 3  # lanes: nothing queues behind returning gradients, nor behind a head exchange (lanes 0 and 1)
_TURNS = 2  # buffers: one is read while the next is filled


def gather_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, into: Partial | None = None) -> Partial:
    """Return attention of this rank's queries over the whole sequence; see `ring_forward`.

    Args:
        call: The attention.
        q: `[batch, tokens, heads, head_dim]`.
        k: `[batch, tokens, kv_heads, head_dim]`.
        v: `[batch, tokens, kv_heads, value_dim]`.
        into: Where to write the results, as `Kernel.forward`. Default: new memory.
    """
    plan = _plan(call, q, k, v)
    arriving = _KeyValuePrefetch(call, plan, k, v)
    whole = local_forward(call, q, k, v, into, tiles=plan.own)
    for i, unit in enumerate(plan.units):
        keys, values = arriving.wait(i)
        heads = unit.heads.slice
        for tile in plan.forward:
            rows = tile.queries.slice
            part = tile_forward(call, tile, q[:, :, heads], keys, values)
            merge_partials_(whole.out[:, rows, heads], whole.lse[:, heads, rows], *part)
    return whole


def gather_backward(call: AttentionCall, given: BackwardInputs, into: Gradients | None = None) -> Gradients:
    """Return the gradients of this rank's q, k and v in their dtype; `into` as above."""
    grad_out, q, k, v, lse, delta = given
    plan = _plan(call, q, k, v)
    if into is None:
        into = empty_gradients(q, k, v)
    for gradient, real in zip(into, (plan.real, plan.real_keys, plan.real_keys), strict=True):
        gradient[:, real:] = 0

    arriving, returning = _KeyValuePrefetch(call, plan, k, v), _GradientExchange(call, plan, (k, v), into)
    for i, unit in enumerate(plan.units):
        heads = unit.heads.slice
        q_parts = q.new_empty(1 + len(plan.backward), q.shape[0], plan.real, len(unit.heads), q.shape[3])
        if plan.query_sums.zeroed:
            q_parts[1:] = 0
        kv = unit.kv_heads.slice
        own = BackwardInputs(
            *(t[:, : plan.real, heads] for t in (grad_out, q)),
            *(t[:, : plan.real_keys, kv] for t in (k, v)),
            *(t[:, heads, : plan.real] for t in (lse, delta)),
        )
        local_backward(call, own, Gradients(q_parts[0], *returning.own_parts(i)), tiles=plan.own)
        keys, values = arriving.wait(i)
        others = BackwardInputs(grad_out[:, :, heads], q[:, :, heads], keys, values, lse[:, heads], delta[:, heads])
        grad_k, grad_v = returning.outbox(i)
        for part, tile in enumerate(plan.backward, 1):
            grad_q, columns = q_parts[part][:, tile.queries.slice], tile.keys.slice
            if plan.apart:
                target = Gradients(grad_q, grad_k[:, columns], grad_v[:, columns])
                tile_backward(call, tile, others, target)
            else:
                shares = tile_backward(call, tile, others)
                grad_q.copy_(shares.q)
                # Of a key only one tile's share is non-zero, except in a tree: one of each level.
                grad_k[:, columns] += shares.k
                grad_v[:, columns] += shares.v
        returning.send(i)
        _add_up(plan.query_sums, q_parts, into.q[:, :, heads])
        if i:
            returning.bring_home(i - 1)  # it has arrived while these kernels ran
    returning.bring_home(len(plan.units) - 1)
    return into


class _DoubleBuffer:
    """Double buffer for K and V of the units, or for parts of their gradients.

    Ranks differ in the number of visible keys and of parts: every rank allocates what the largest one needs.
    """

    def __init__(self, plan: GatherPlan, like: Pair, tokens: int) -> None:
        most = max(len(unit.kv_heads) for unit in plan.units)
        turns = min(_TURNS, len(plan.units))
        self._widths = [each.shape[3] for each in like]
        self._memory = [
            [each.new_empty(tokens * each.shape[0] * most * each.shape[3]) for each in like] for _ in range(turns)
        ]

    def at(self, i: int) -> Sequence[Tensor]:
        """Return unit i's memory, the same on every rank."""
        return self._memory[i % _TURNS]

    def shaped(self, i: int, *shape: int) -> Pair:
        """Return the beginning of unit i's memory as two tensors, `[*shape, head_dim]` each."""
        numel = torch.Size(shape).numel()
        k, v = (flat[: numel * width].view(*shape, width) for flat, width in zip(self.at(i), self._widths, strict=True))
        return k, v


class _KeyValuePrefetch:
    """Prefetches the keys and values of each unit. The first transfer starts at construction."""

    def __init__(self, call: AttentionCall, plan: GatherPlan, k: Tensor, v: Tensor) -> None:
        self._call, self._plan, self._held = call, plan, (k, v)
        self._buffers = _DoubleBuffer(plan, self._held, plan.most_seen)
        self._under_way: list[Transfer] = []
        self._start()

    def wait(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the pulled keys and values of unit i, and start the transfer of the next unit.

        It overwrites the buffer of the previous unit: all kernels that read that buffer must be launched before.
        """
        self._start()
        if self._under_way:
            self._under_way[i].wait()
        batch = self._held[0].shape[0]
        return self._buffers.shaped(i, batch, self._plan.seen, len(self._plan.units[i].kv_heads))

    def _start(self) -> None:
        i = len(self._under_way)
        if i == len(self._plan.units) or not self._plan.most_seen:
            return
        (exchange, starts), kv = self._plan.inbound[i], self._plan.units[i].kv_heads.slice
        outbox = self._call.comm.outbox(exchange.nbytes, _IN)
        for start, tensor in zip(starts, self._held, strict=True):
            mine = tensor[:, :, kv]
            tensor_in(outbox, start, mine.shape, mine.dtype).copy_(mine)
        self._under_way.append(self._call.comm.pull(exchange, outbox, self._buffers.at(i), _IN))


class _GradientExchange:
    """Exchanges dK and dV of each unit: sends those of other ranks' keys, receives and sums those of own keys."""

    def __init__(self, call: AttentionCall, plan: GatherPlan, kv: Pair, into: Gradients) -> None:
        self._comm, self._plan, self._like, self._into = call.comm, plan, kv, into
        self._staging = _DoubleBuffer(plan, kv, plan.most_key_parts * call.layout.keys.tokens)
        self._outbox = kv[0].new_empty(0)
        self._under_way: list[Transfer] = []

    def own_parts(self, i: int) -> tuple[Tensor, Tensor]:
        """Return memory for dK and dV of own keys by own queries, `[batch, real_keys, kv_heads, head_dim]` each."""
        k, v = self._parts(i)
        return k[0], v[0]

    def outbox(self, i: int) -> list[Tensor]:
        """Return memory for dK and dV of the pulled keys, `[batch, seen, kv_heads, head_dim]` each.

        It is zeroed unless the tiles write all of it.
        """
        kv_heads = len(self._plan.units[i].kv_heads)
        shapes = [torch.Size((t.shape[0], self._plan.seen, kv_heads, t.shape[3])) for t in self._like]
        if not self._plan.most_seen:
            return [like.new_empty(shape) for like, shape in zip(self._like, shapes, strict=True)]
        exchange, starts = self._plan.outbound[i]
        self._outbox, dtype = self._comm.outbox(exchange.nbytes, _OUT), self._like[0].dtype
        parts = [tensor_in(self._outbox, *place, dtype) for place in zip(starts, shapes, strict=True)]
        return parts if self._plan.apart else [part.zero_() for part in parts]

    def send(self, i: int) -> None:
        """Start the exchange: send the outbox, receive the other ranks' parts for own keys."""
        if self._plan.key_sums.zeroed:
            for parts in self._parts(i):
                parts[1:] = 0
        if not self._plan.most_seen:
            return
        self._under_way.append(
            self._comm.pull(self._plan.outbound[i].exchange, self._outbox, self._staging.at(i), _OUT)
        )

    def bring_home(self, i: int) -> None:
        """Wait for the exchange of unit i and sum the gradients of own keys and values."""
        if self._under_way:
            self._under_way[i].wait()
        for parts, gradient in zip(self._parts(i), self._into[1:], strict=True):
            _add_up(self._plan.key_sums, parts, gradient[:, :, self._plan.units[i].kv_heads.slice])

    def _parts(self, i: int) -> tuple[Tensor, Tensor]:
        batch, kv_heads = self._like[0].shape[0], len(self._plan.units[i].kv_heads)
        return self._staging.shaped(i, self._plan.key_parts, batch, self._plan.real_keys, kv_heads)


def _plan(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> GatherPlan:
    shapes = head_shapes_of(call, q.shape, k.shape, v.shape, q.dtype)
    return make_gather_plan(shapes, call.length, call.mask, call.comm.rank, call.strategy.most_kv_heads)


def _add_up(sums: GradientSumPlan, parts: Tensor, out: Tensor) -> None:
    for rows in sums.rows:
        sum_parts(parts[: rows.parts, :, rows.tokens.slice], out[:, rows.tokens.slice])
