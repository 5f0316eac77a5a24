"""Measures a cell of the paper's benchmark on a rank: times of the slowest rank, bytes received, peak memory.

The ring is that of the library (`bmburst.attention.ring`). An ablation replaces the communicator, the kernel, or the
merging of partial results.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.method import LocalKernel, Method, Setting, prepare, random_inputs
from benchmarks.attention.methods import all_methods
from benchmarks.engine import Row
from benchmarks.engine.job import RankRun
from benchmarks.engine.machine import RankGroup
from benchmarks.engine.timing import Times, in_turns, once
from benchmarks.paper.kind import AT_THE_END, BURST, KV, NO_OVERLAP, WHOLE_TILE, PaperCell
from bmburst.amounts import GIB
from bmburst.attention.api import resolve_group
from bmburst.attention.call import AttentionCall, decide
from bmburst.attention.local import tile_forward
from bmburst.attention.options import AttentionOptions
from bmburst.attention.ring import carry_home, ring_backward, ring_forward, visiting_kv
from bmburst.comm import BlockMover, CompletedTransfer, Transfer
from bmburst.schedule.exchange import Exchange
from bmburst.schedule.ring_schedule import Step
from bmburst_ops.flash import CAUSAL, FULL, BackwardInputs, Gradients, Partial
from bmburst_ops.flash.inputs import require_no_softcap
from bmburst_ops.flash.kernel import deliver_gradients, deliver_partial, finite
from bmburst_ops.merge import accumulation_dtype, merge_partials_, row_dots
from bmburst_ops.pattern import Need, Pattern

Call = Callable[[], object]


class PaperRun(RankRun[PaperCell]):
    """See `RankRun`."""

    def prepare(self) -> None:
        """See `RankRun.prepare`."""
        self.kernel, self.methods = LocalKernel(self.job.kernel), all_methods(self.device.type)
        world, first = dist.group.WORLD, dist.new_group([0])
        groups = {1: first, self.world: world} if self.world > 1 else {1: world}
        self.groups = {size: group for size, group in groups.items() if self.rank < size}

    def refusal(self, cell: PaperCell) -> str | None:
        """See `RankRun.refusal`: no cell is refused, since running out of memory is a result."""
        del cell
        return None

    def measure(self, cell: PaperCell) -> Row:
        """See `RankRun.measure`.

        * `milliseconds`: times of each call on the slowest rank; see `_whole` and `_ring_calls`.
        * `bytes`: bytes that this rank receives from others in a ring's backward.
        * `peak_gib`: peak memory of each call on this rank, with inputs and results; `peak_memory_gib`: their maximum.
        """
        process_group = self.groups[cell.ranks]
        assert process_group is not None  # this rank takes part
        group = RankGroup(
            process_group=process_group,
            rank=self.rank,
            size=cell.ranks,
            device=self.device,
            is_world=cell.ranks == self.world,
        )
        setting = Setting(group=group, kernel=self.kernel, kernel_name=self.job.kernel)
        method = self.methods[cell.attention.method if cell.suite in ("sequence", "batch") else "ours"]
        row: Row = {"layout": method.layout(cell.attention)}
        if cell.suite in ("sequence", "batch"):
            row |= method.resolve(cell.attention, setting)[1]
            calls = _whole(method, cell, setting)
        else:
            calls, row["bytes"] = _ring_calls(method, cell, setting)
        times, peaks = {}, {}
        for name, call in calls.items():
            self.gauge.clear()
            times[name] = asdict(self._time(call, group))
            peak = self.gauge.peak()
            peaks[name] = None if peak is None else peak / GIB
        known = [peak for peak in peaks.values() if peak is not None]
        return row | {"milliseconds": times, "peak_gib": peaks, "peak_memory_gib": max(known, default=None)}

    def _time(self, call: Call, group: RankGroup) -> Times:
        """Return a call's times. A call longer than --cell-seconds is timed once, after a warm-up call."""
        longest = self.job.cell_seconds * 1e3
        if once(call, group) > longest and (taken := once(call, group)) > longest:
            return Times.of([taken])
        (times,) = in_turns(call, group=group, repeats=self.job.repeats, seconds=self.job.cell_seconds)
        return Times.of(times)


def _whole(method: Method, cell: PaperCell, setting: Setting) -> dict[str, Call]:
    """Return the calls of a method's attention: forward without autograd, and forward with backward."""
    calls = prepare(method, cell.attention, setting)
    return {"forward": calls.forward, "forward_backward": calls.both}


def _ring_calls(method: Method, cell: PaperCell, setting: Setting) -> tuple[dict[str, Call], int]:
    """Return the calls of a ring over NCCL (gloo on CPUs), and the bytes that a rank receives in backward.

    Forward and backward are those of the executor, except for the part that the cell's method replaces. `transfers`
    are the transfers of backward without its kernels.
    """
    device = setting.group.device
    q, k, v, grad_out = (t.detach() for t in random_inputs(method, cell.attention, device, setting.group.rank))
    call = _ring(method, cell, setting, q, k)
    forward = partial(forward_at_the_end if cell.method == AT_THE_END else ring_forward, call, q, k, v)
    result: Partial = forward()
    given = BackwardInputs(grad_out, q, k, v, result.lse, row_dots(grad_out, result.out))
    del result
    calls: dict[str, Call] = {"forward": forward, "backward": partial(ring_backward, call, given)}
    if cell.suite == "backward":
        calls["transfers"] = partial(backward_transfers, call, given)
    counted = Counting(call.comm)
    backward_transfers(replace(call, comm=counted), given)
    return calls, counted.received


def _ring(method: Method, cell: PaperCell, setting: Setting, q: Tensor, k: Tensor) -> AttentionCall:
    options = AttentionOptions(
        mask=cell.mask,
        layout=method.layout(cell.attention),
        kernel=setting.kernel_name,
        strategy=KV if cell.method == KV else BURST,
        transport="nccl" if setting.group.device.type == "cuda" else "gloo",
    )
    call = decide(resolve_group(None), q, k, torch.empty_like(k), None, options)
    if cell.method == NO_OVERLAP:
        return replace(call, comm=Waiting(call.comm))
    return replace(call, kernel=WholeTile()) if cell.method == WHOLE_TILE else call


class Counting:
    """A `BlockMover` that counts the bytes that this rank receives from others.

    Args:
        comm: The mover that it wraps.

    Attributes:
        received: Bytes received so far.
    """

    def __init__(self, comm: BlockMover) -> None:
        self._comm = comm
        self.received = 0

    @property
    def rank(self) -> int:
        """See `BlockMover.rank`."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """See `BlockMover.size`."""
        return self._comm.size

    @property
    def transport(self) -> str:
        """See `BlockMover.transport`."""
        return self._comm.transport

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        if shift % self.size:
            self.received += sum(tensor.nbytes for tensor in tensors)
        return self._comm.ring(*tensors, shift=shift)

    def outbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.outbox`."""
        return self._comm.outbox(nbytes, lane)

    def pull(self, exchange: Exchange, outbox: Tensor, targets: Sequence[Tensor], lane: int = 0) -> Transfer:
        """See `BlockMover.pull`."""
        self.received += received_bytes(exchange)
        return self._comm.pull(exchange, outbox, targets, lane)

    def inbox(self, nbytes: int, lane: int = 0) -> Tensor:
        """See `BlockMover.inbox`."""
        return self._comm.inbox(nbytes, lane)

    def push(self, exchange: Exchange, sources: Sequence[Tensor], inbox: Tensor, lane: int = 0) -> Transfer:
        """See `BlockMover.push`."""
        self.received += received_bytes(exchange)
        return self._comm.push(exchange, sources, inbox, lane)


class Waiting(Counting):
    """A `BlockMover` whose `ring` waits for its transfer, so that no kernel overlaps with it."""

    def ring(self, *tensors: Tensor, shift: int = 1) -> Transfer:
        """See `BlockMover.ring`."""
        return CompletedTransfer(super().ring(*tensors, shift=shift).wait())


def received_bytes(exchange: Exchange) -> int:
    """Return the bytes that a rank receives from others in an exchange."""
    others = (moves for peer, moves in enumerate(exchange.receives) if peer != exchange.rank)
    return sum(move.source.nbytes for moves in others for move in moves)


def forward_at_the_end(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Return the result of `ring_forward`, but merge partial results only after the last step.

    Args:
        call: The attention call.
        q: Queries, `[batch, tokens, heads, head_dim]`.
        k: Keys, `[batch, tokens, kv_heads, head_dim]`.
        v: Values, with the shape of `k`.
    """
    parts = [
        (tile.queries.slice, *tile_forward(call, tile, q, keys, values))
        for step, (keys, values) in visiting_kv(call, k, v)
        for tile in step.tiles
    ]
    dtype = accumulation_dtype(q.dtype)
    out = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype, device=q.device)
    for rows, part, part_lse in parts:
        merge_partials_(out[:, rows], lse[:, :, rows], part, part_lse)
    return Partial(out.to(q.dtype), lse)


def backward_transfers(call: AttentionCall, given: BackwardInputs) -> tuple[Tensor, ...]:
    """Run the transfers of a ring's backward without its kernels; gradients are accumulated at each hop.

    Args:
        call: The attention call, over a ring.
        given: The inputs of backward.
    """
    dtype = accumulation_dtype(given.q.dtype)
    if call.strategy.ring_tensors == "kv":
        own: tuple[Tensor, ...] = (given.k, given.v)
        shares = tuple(torch.zeros_like(t, dtype=dtype) for t in own)
    else:
        own = (given.q, given.grad_out, given.lse, given.delta)
        shares = (torch.zeros_like(given.q, dtype=dtype),)

    def nothing(step: Step, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        del step, received
        return shares

    return carry_home(call, call.strategy.ring_tensors, own, nothing)


class WholeTile:
    """`Kernel` that writes all scores of a tile to memory, as attention without LAO does.

    For each head, query and key, memory holds a score in fp32 and a weight in the inputs' dtype. Products are in the
    inputs' dtype.
    """

    name = "whole-tile"
    recordable = False
    takes_delta = True

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del q, k
        return "supports causal and full masks only" if needs else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pattern: Pattern,
        scale: float,
        softcap: float | None = None,
        into: Partial | None = None,
    ) -> Partial:
        """See `Kernel.forward`."""
        require_no_softcap(softcap, self.name)
        scores = _scores(q, k, pattern, scale)
        most = finite(scores.amax(-1, keepdim=True))
        total = scores.sub_(most).exp_().sum(-1, keepdim=True)
        lse = (most + total.log()).squeeze(-1)
        weights = scores.div_(total.clamp_min(torch.finfo(total.dtype).tiny)).to(v.dtype)
        del scores
        out = _from_heads(weights @ _to_heads(v, k.shape[2]), q)
        return deliver_partial(Partial(out, lse.unflatten(-1, (-1, q.shape[1])).flatten(1, 2)), into)

    def backward(
        self,
        given: BackwardInputs,
        *,
        pattern: Pattern,
        scale: float,
        deterministic: bool,
        softcap: float | None = None,
        into: Gradients | None = None,
    ) -> Gradients:
        """See `Kernel.backward`. P = exp(S - lse), dS = P * (dO V^T - delta) * scale (arXiv:2307.08691)."""
        require_no_softcap(softcap, self.name)
        del deterministic  # it always is
        grad_out, q, k, v, lse, delta = given
        kv_heads = k.shape[2]
        queries, keys, values, grads = (_to_heads(t, kv_heads) for t in (q, k, v, grad_out))
        row_lse, row_delta = (t.unflatten(1, (kv_heads, -1)).flatten(2, 3)[..., None] for t in (lse, delta))
        weights = _scores(q, k, pattern, scale).sub_(finite(row_lse)).exp_()
        grad_v = weights.to(q.dtype).mT @ grads
        inner = (grads @ values.mT).to(weights.dtype).sub_(row_delta)
        grad_scores = weights.mul_(inner).mul_(scale).to(q.dtype)
        del inner, weights
        grad_q, grad_k = grad_scores @ keys, grad_scores.mT @ queries
        found = Gradients(_from_heads(grad_q, q), grad_k.transpose(1, 2), grad_v.transpose(1, 2))
        return deliver_gradients(found, into)


def _scores(q: Tensor, k: Tensor, pattern: Pattern, scale: float) -> Tensor:
    """Return the scores `[batch, kv_heads, group x queries, keys]` in fp32 or wider; -inf where a key is hidden."""
    kv_heads, (count, keys) = k.shape[2], (q.shape[1], k.shape[1])
    found = (_to_heads(q, kv_heads) @ _to_heads(k, kv_heads).mT).to(accumulation_dtype(q.dtype)).mul_(scale)
    if pattern == CAUSAL:
        hidden = torch.ones(count, keys, dtype=torch.bool, device=q.device).triu_(1 + keys - count)
        found.unflatten(2, (-1, count)).masked_fill_(hidden, -torch.inf)
    else:
        assert pattern == FULL  # see `refusal`
    return found


def _to_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Return `[batch, tokens, heads, dim]` as `[batch, kv_heads, group x tokens, dim]`."""
    grouped: Tensor = x.unflatten(2, (kv_heads, -1))
    return grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _from_heads(x: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of `_to_heads` for a tensor shaped as q."""
    grouped: Tensor = x.unflatten(2, (-1, like.shape[1]))
    return grouped.permute(0, 3, 1, 2, 4).reshape(like.shape)
