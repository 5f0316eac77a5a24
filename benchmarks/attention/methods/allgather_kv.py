"""All-gather KV, the context parallelism of Llama 3 (arXiv:2407.21783, section 3.3.2), in zigzag order."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.cells import Cell
from benchmarks.attention.masks import pattern_of
from benchmarks.attention.methods.local import ForBackward, Shape
from benchmarks.attention.methods.method import Attend, Method, Setting, applied
from benchmarks.attention.work import Traffic, sizes
from bmburst.schedule.layout import make_layout


class AllGatherKV(Method):
    """K and V of all ranks are gathered and kept; each of a rank's two chunks is one bottom-right causal call."""

    name = "allgather-kv"

    def layout(self, cell: Cell) -> str:
        """See `Method.layout`: two chunks a rank, so that a causal mask gives all ranks the same work."""
        return "zigzag" if cell.is_causal else "contiguous"

    def traffic(self, cell: Cell) -> Traffic:
        """See `Method.traffic`: everyone's K and V forward, everyone's share of our dK and dV backward."""
        once = 2.0 * sizes(cell).k * (cell.ranks - 1)
        return Traffic(once, 2 * once)

    def memory(self, cell: Cell) -> float:
        """See `Method.memory`: whole K and V as they came and in order, their gradients in fp32 and as they leave."""
        own = sizes(cell)
        return own.held + own.q * own.wide + 2 * own.k * cell.ranks * (3 + own.wide)

    def bind(self, cell: Cell, setting: Setting) -> Attend:
        """See `Method.bind`."""
        return applied(_AllGather, setting, _plan(cell, self.layout(cell), setting))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where chunks stand, and what each of this rank's may see.

    Attributes:
        order: `order[g]` is the place of the g-th chunk of the sequence when chunks are listed rank by rank.
        places: The inverse of `order`.
        calls: This rank's chunks: their local rows, and how many keys they may see.
        chunks: Chunks a rank holds.
        pattern: What a call's queries see, at the bottom right.
        scale: Factor on the scores.
    """

    order: Tensor
    places: Tensor
    calls: tuple[tuple[slice, int], ...]
    chunks: int
    pattern: Shape
    scale: float


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
