"""Reimplementations of other methods: Ulysses, tensor parallelism, all-gather of K and V, ring self-attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.cells import MASKS, Cell, Traffic, pattern_of, sizes
from benchmarks.attention.method import Attend, ForBackward, Method, PackedPattern, Setting, applied, heads_refusal
from benchmarks.engine.machine import RankGroup
from bmburst.recompute import keep
from bmburst.schedule.layout import make_layout


class Ulysses(Method):
    """DeepSpeed-Ulysses (arXiv:2309.14509): an all-to-all of q, k and v, one kernel call, an all-to-all of the output.

    Transfers do not overlap with the kernel. Inside `bmburst.recompute.checkpoint` the kernel's results are kept, and
    only transfers are repeated.
    """

    name = "ulysses"
    masks = MASKS

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        return heads_refusal(cell)

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: each tensor without the rank's own part; backward moves dO, dQ, dK and dV."""
        own = sizes(cell)
        once = (2 * own.q + 2 * own.k) * (cell.ranks - 1) / cell.ranks
        return Traffic(once, 2 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: tensors sharded by tokens and by heads, and the buffers of an all-to-all."""
        own = sizes(cell)
        return 2 * own.held + own.q * own.wide

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        return applied(_Ulysses, setting, pattern_of(cell.mask, cell.tokens), cell.head_dim**-0.5)


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, setting: Setting, pattern: PackedPattern, scale: float
    ) -> Tensor:
        q, k, v = to_heads(setting.group, q, k, v)
        out, lse = keep(lambda: setting.kernel.forward(q, k, v, pattern, scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = setting, pattern, scale
        return to_tokens(setting.group, out)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        setting, pattern, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        (mine,) = to_heads(setting.group, grad)
        grads = setting.kernel.backward(q, k, v, ForBackward(mine, out, lse), pattern, scale)
        return *to_tokens(setting.group, *grads), None, None, None


def to_heads(group: RankGroup, *tensors: Tensor) -> list[Tensor]:
    """Reshard from tokens, `[batch, tokens / P, heads, dim]`, to heads, `[batch, tokens, heads / P, dim]`.

    All tensors are exchanged in one all-to-all. For one sequence the results are views of the received buffer.
    """
    batch, _, _, dim = tensors[0].shape
    packed = torch.cat([t.unflatten(2, (group.size, -1)) for t in tensors], 3)  # [batch, n, P, heads of all, dim]
    arrived = group.all_to_all(packed.permute(2, 0, 1, 3, 4).contiguous())  # [P, batch, n, heads, dim]
    whole = arrived.transpose(0, 1).reshape(batch, -1, arrived.shape[3], dim)
    return list(whole.split([t.shape[2] // group.size for t in tensors], 2))


def to_tokens(group: RankGroup, *tensors: Tensor) -> list[Tensor]:
    """Reshard from heads back to tokens, in one all-to-all."""
    packed = torch.cat(tensors, 2) if len(tensors) > 1 else tensors[0]
    parts = packed.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()  # [P, batch, n, heads of all, dim]
    arrived = group.all_to_all(parts).permute(1, 2, 0, 3, 4)  # [batch, n, P, heads of all, dim]
    heads = [t.shape[2] for t in tensors]
    return [part.flatten(2, 3) for part in arrived.split(heads, 3)]


class TensorParallelV1(Method):
    """Megatron (arXiv:1909.08053): heads sharded over the ranks, an all-reduce after attention and one in backward.

    Projections are not included, but their collectives are, on tensors of the size of the hidden states, `[batch,
    tokens, heads x dim]`. Forward sums the output, with zeros for the heads of other ranks. Backward sums dQ instead of
    the gradient of the hidden states. q, k and v already exist when the timing starts.
    """

    name = "tensor-parallel-v1"
    masks = MASKS
    sequence_parallel = False

    def shape_refusal(self, cell: Cell) -> str | None:
        """See `Method.shape_refusal`."""
        return heads_refusal(cell)

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: an all-reduce is a reduce-scatter and an all-gather of the whole hidden state."""
        once = 2.0 * sizes(cell).q * (cell.ranks - 1)
        return Traffic(once, 2 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: the rank's heads, and output and gradient of all heads with a buffer for each."""
        own = sizes(cell)
        return own.held + own.q * own.wide + 4 * own.q * cell.ranks

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        scale = cell.head_dim**-0.5
        return applied(_TensorParallel, setting, self.sequence_parallel, pattern_of(cell.mask, cell.tokens), scale)

    def cut_input(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """See `Method.cut_input`: the rank's heads of all tokens."""
        return whole.chunk(cell.ranks, 2)[rank]

    def cut_output(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """See `Method.cut_output`: the whole output."""
        del cell, rank
        return whole

    def input_shape(self, cell: Cell, heads: int) -> tuple[int, ...]:
        """See `Method.input_shape`."""
        return cell.batch, cell.tokens, heads // cell.ranks, cell.head_dim

    def output_shape(self, cell: Cell) -> tuple[int, ...]:
        """See `Method.output_shape`."""
        return cell.batch, cell.tokens, cell.heads, cell.head_dim


class TensorParallelV3(TensorParallelV1):
    """Megatron with sequence parallelism (arXiv:2205.05198): an all-gather before attention, a reduce-scatter after.

    Backward has both as well.
    """

    name = "tensor-parallel-v3"
    sequence_parallel = True

    def cut_output(self, whole: Tensor, cell: Cell, rank: int) -> Tensor:
        """See `Method.cut_output`: the rank's tokens."""
        return whole.chunk(cell.ranks, 1)[rank]

    def output_shape(self, cell: Cell) -> tuple[int, ...]:
        """See `Method.output_shape`."""
        return cell.batch, cell.tokens // cell.ranks, cell.heads, cell.head_dim


class _TensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, setting: Setting, split: bool, pattern: PackedPattern, scale: float
    ) -> Tensor:
        if split:  # the all-gather of the projections' input; its values do not matter
            batch, tokens, heads, dim = q.shape
            setting.group.all_gather(
                q.new_empty((batch, tokens // setting.group.size, heads * setting.group.size, dim))
            )
        out, lse = setting.kernel.forward(q, k, v, pattern, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = setting, split, pattern, scale
        return _sum(setting.group, out, split)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        setting, split, pattern, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        group = setting.group
        whole = group.all_gather(grad).transpose(0, 1).flatten(1, 2) if split else grad
        mine = whole.chunk(group.size, 2)[group.rank]
        grads = setting.kernel.backward(q, k, v, ForBackward(mine, out, lse), pattern, scale)
        _sum(group, grads.q, split)  # instead of dX
        return *grads, None, None, None, None


def _sum(group: RankGroup, own: Tensor, split: bool) -> Tensor:
    """Pad a rank's heads with zeros to `[batch, tokens, all heads, dim]`, and return the sum over the ranks."""
    batch, tokens, heads, dim = own.shape
    if not split:
        whole = own.new_zeros((batch, tokens, heads * group.size, dim))
        whole[:, :, group.rank * heads : (group.rank + 1) * heads] = own
        return group.all_reduce(whole)
    parts = own.new_zeros((group.size, batch, tokens // group.size, heads * group.size, dim))
    rows = own.unflatten(1, (group.size, -1)).transpose(0, 1)
    parts[:, :, :, group.rank * heads : (group.rank + 1) * heads] = rows
    return group.reduce_scatter(parts)


class AllGatherKV(Method):
    """Llama 3's context parallelism (arXiv:2407.21783, section 3.3.2): an all-gather of K and V, kept for backward.

    Each of a rank's two chunks is one kernel call with a causal mask aligned at the bottom right.
    """

    name = "allgather-kv"

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`: zigzag balances the work of a causal mask."""
        return "zigzag" if cell.is_causal else "contiguous"

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: K and V of all ranks in forward, shares of dK and dV from all ranks in backward."""
        once = 2.0 * sizes(cell).k * (cell.ranks - 1)
        return Traffic(once, 2 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: K and V of all ranks, received and reordered, and dK and dV, in fp32 and to send."""
        own = sizes(cell)
        return own.held + own.q * own.wide + 2 * own.k * cell.ranks * (3 + own.wide)

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        return applied(_AllGather, setting, _plan(cell, self.layout(cell), setting))


@dataclass(frozen=True, slots=True)
class _Plan:
    """The order of chunks, and the kernel calls of this rank."""

    order: Tensor  # `order[g]` is the index of the g-th chunk of the sequence when chunks are listed rank by rank
    places: Tensor  # the inverse of `order`
    calls: tuple[tuple[slice, int], ...]  # for each of this rank's chunks its local rows and its number of visible keys
    chunks: int  # number of chunks per rank
    pattern: PackedPattern  # the mask of a call, aligned at the bottom right
    scale: float  # factor on the scores


def _plan(cell: Cell, layout_name: str, setting: Setting) -> _Plan:
    layout = make_layout(layout_name, cell.ranks, cell.tokens // cell.ranks)
    runs = [layout.runs(rank) for rank in range(cell.ranks)]
    places = torch.tensor([run.start // run.tokens for own in runs for run in own], device=setting.group.device)
    calls = tuple(
        (slice(run.offset, run.offset + run.tokens), run.start + run.tokens if cell.is_causal else cell.tokens)
        for run in runs[setting.group.rank]
    )
    pattern = pattern_of(cell.mask, cell.tokens)
    return _Plan(torch.argsort(places), places, calls, len(runs[0]), pattern, cell.head_dim**-0.5)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, setting: Setting, plan: _Plan) -> Tensor:
        arrived = setting.group.all_gather(torch.stack((k, v)))  # [P, 2, batch, n, kv_heads, dim]
        chunks = arrived.unflatten(3, (plan.chunks, -1)).permute(1, 2, 0, 3, 4, 5, 6).flatten(2, 3)
        keys, values = chunks.index_select(2, plan.order).flatten(2, 3)
        del arrived, chunks
        parts = [
            setting.kernel.forward(q[:, rows], keys[:, :seen], values[:, :seen], plan.pattern, plan.scale)
            for rows, seen in plan.calls
        ]
        outs, statistics = zip(*parts, strict=True)
        ctx.save_for_backward(q, keys, values, *outs, *statistics)
        ctx.call = setting, plan
        return torch.cat(outs, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        setting, plan = ctx.call
        q, keys, values, *results = ctx.saved_tensors
        outs, statistics = results[: len(plan.calls)], results[len(plan.calls) :]
        wide = torch.promote_types(keys.dtype, torch.float32)
        totals = torch.zeros((2, *keys.shape), dtype=wide, device=keys.device)
        grad_q = []
        for (rows, seen), out, lse in zip(plan.calls, outs, statistics, strict=True):
            results = ForBackward(grad[:, rows], out, lse)
            inputs = q[:, rows], keys[:, :seen], values[:, :seen]
            part = setting.kernel.backward(*inputs, results, plan.pattern, plan.scale)
            grad_q.append(part.q)
            totals[0, :, :seen] += part.k
            totals[1, :, :seen] += part.v
        ranks = setting.group.size
        chunks = totals.to(keys.dtype).unflatten(2, (ranks * plan.chunks, -1)).index_select(2, plan.places)
        parts = chunks.unflatten(2, (ranks, plan.chunks)).permute(2, 0, 1, 3, 4, 5, 6).contiguous()
        grad_k, grad_v = setting.group.reduce_scatter(parts).flatten(2, 3)
        return torch.cat(grad_q, 1), grad_k, grad_v, None, None


class RingLi(Method):
    """Ring self-attention of Li et al. (arXiv:2105.13120): K moves around a ring for the scores, V for the output.

    Each rank stores whole rows of scores: memory is quadratic. A causal mask saves no FLOPs.
    """

    name = "ring-li-2021"

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: a round of K and V in forward and backward, and a reduce-scatter of dV and dK."""
        once = 2.0 * sizes(cell).k * (cell.ranks - 1)
        return Traffic(once, 3 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: at the peak, four matrices of weights and gradients, each tokens^2 / P per head."""
        own = sizes(cell)
        scores = own.q / cell.head_dim * cell.tokens
        return own.held + 4 * scores + 2 * own.k * cell.ranks

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        return applied(_RingLi, setting.group, cell.is_causal, cell.head_dim**-0.5)


class _RingLi(torch.autograd.Function):
    """Tensors are `[batch, kv_heads, group x tokens, dim]`: one product serves all query heads of a KV head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: RankGroup, causal: bool, scale: float) -> Tensor:
        queries, keys, values = _by_kv_head(q, k.shape[2]), _by_kv_head(k, k.shape[2]), _by_kv_head(v, k.shape[2])
        local = k.shape[1]
        scores = queries.new_empty((*queries.shape[:3], local * group.size))
        for owner, block in _visits(group, keys):
            torch.matmul(queries * scale, block.mT, out=scores[..., owner * local : (owner + 1) * local])
        if causal:
            _hide(scores, local, group.rank * local)
        weights = torch.softmax(scores, -1)
        del scores
        out = torch.zeros_like(queries)
        for owner, block in _visits(group, values):
            out += weights[..., owner * local : (owner + 1) * local] @ block
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.call = group, scale, q.shape
        return _by_token(out, q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, scale, shape = ctx.call
        queries, keys, values, weights = ctx.saved_tensors
        kv_shape, local = (shape[0], shape[1], keys.shape[1], shape[3]), shape[1]
        grads = _by_kv_head(grad, keys.shape[1])
        grad_v = _reduced(group, weights, grads)
        inner = torch.empty_like(weights)
        for owner, block in _visits(group, values):
            torch.matmul(grads, block.mT, out=inner[..., owner * local : (owner + 1) * local])
        inner -= (
            (inner * weights)
            .sum(-1, keepdim=True, dtype=torch.promote_types(inner.dtype, torch.float32))
            .to(inner.dtype)
        )
        inner *= weights
        inner *= scale
        grad_q = torch.zeros_like(queries)
        for owner, block in _visits(group, keys):
            grad_q += inner[..., owner * local : (owner + 1) * local] @ block
        grad_k = _reduced(group, inner, queries)
        return _by_token(grad_q, shape), _by_token(grad_k, kv_shape), _by_token(grad_v, kv_shape), None, None, None


def _visits(group: RankGroup, block: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's block with its owner, starting with this rank's, while the next block is transferred."""
    for step in range(group.size):
        arriving = group.rotate(block) if step + 1 < group.size else None
        yield (group.rank - step) % group.size, block
        if arriving is not None:
            block, works = arriving
            for work in works:
                work.wait()


def _reduced(group: RankGroup, weights: Tensor, rows: Tensor) -> Tensor:
    """Return the rows of `weights^T rows` for this rank's keys, summed over the ranks."""
    whole = weights.mT @ rows  # [batch, kv_heads, tokens, dim]
    return group.reduce_scatter(whole.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4).contiguous())


def _hide(scores: Tensor, local: int, first: int) -> None:
    rows = torch.arange(first, first + local, device=scores.device)
    hidden = rows[:, None] < torch.arange(scores.shape[-1], device=scores.device)
    scores.unflatten(2, (-1, local)).masked_fill_(hidden, -torch.inf)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    grouped: Tensor = x.unflatten(2, (kv_heads, -1))
    return grouped.permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()


def _by_token(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    grouped: Tensor = x.unflatten(2, (-1, shape[1]))
    return grouped.permute(0, 3, 1, 2, 4).reshape(shape)
