"""Biased attention in plain torch, any float dtype, tile by tile: the reference for the Triton kernel."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bmburst_ops.biased.formula import visible
from bmburst_ops.biased.kernel import BiasedGradients, Pairs, require_inputs
from bmburst_ops.flash.kernel import Partial, finite
from bmburst_ops.merge import accumulation_dtype, merge_partials_

_TILE = 256  # queries and keys scored at once, so that memory does not grow with either


class BiasedReferenceKernel:
    """`BiasedKernel` in plain torch, computed in fp32 or wider."""

    name = "reference"

    def refusal(self, q: Tensor) -> str | None:
        """See `BiasedKernel.refusal`: it supports all inputs."""
        del q
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs, *, scale: float) -> Partial:
        """See `BiasedKernel.forward`."""
        require_inputs(q, k, v, table, pairs)
        dtype = accumulation_dtype(q.dtype)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=dtype)
        for tile in _tiles(q, k, table, pairs, scale):
            part_lse = tile.scores.logsumexp(-1)
            weights = torch.exp(tile.scores - finite(part_lse)[..., None])
            part = _product(weights, v[:, tile.keys].to(dtype), tile.seen)
            merge_partials_(out[:, tile.queries], lse[:, :, tile.queries], part, part_lse)
        return Partial(out.to(q.dtype), lse)

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        table: Tensor,
        pairs: Pairs,
        *,
        scale: float,
        rounded: bool = False,
    ) -> BiasedGradients:
        """See `BiasedKernel.backward`. P = exp(S - lse), dS = P * (dO V^T - delta); dS is also the bias's gradient."""
        require_inputs(q, k, v, table, pairs)
        dtype = accumulation_dtype(q.dtype)
        grad_q, grad_k, grad_v = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))
        grad_table = torch.zeros(table.shape, dtype=torch.float64, device=q.device)
        for tile in _tiles(q, k, table, pairs, scale):
            rows, columns = tile.queries, tile.keys
            row_lse, row_delta = (t[:, :, rows].to(dtype)[..., None] for t in (lse, delta))
            weights = torch.exp(tile.scores - finite(row_lse)).masked_fill_(~tile.seen, 0.0)
            grads = grad_out[:, rows].to(dtype)
            grad_v[:, columns] += _product(weights.mT, grads, tile.seen.mT)
            inner = torch.einsum("bqhd,bkhd->bhqk", grads, v[:, columns].to(dtype))
            grad_scores = (weights * (inner - row_delta)).masked_fill_(~tile.seen, 0.0)
            grad_q[:, rows] += _product(grad_scores, k[:, columns].to(dtype), tile.seen) * scale
            grad_k[:, columns] += _product(grad_scores.mT, q[:, rows].to(dtype), tile.seen.mT) * scale
            _add_by_bucket(grad_table, tile.buckets, grad_scores)
        found = BiasedGradients(grad_q, grad_k, grad_v, grad_table.to(accumulation_dtype(table.dtype)))
        return found.rounded(q, k, v, table) if rounded else found


class _Tile(NamedTuple):
    """A tile of queries and keys with a visible pair.

    `scores` are `[batch, heads, queries, keys]`, `-inf` for masked pairs; `buckets` are `[batch, queries, keys]`;
    `seen` is the mask, `[batch, 1, queries, keys]`.
    """

    queries: slice
    keys: slice
    scores: Tensor
    buckets: Tensor
    seen: Tensor


def _tiles(q: Tensor, k: Tensor, table: Tensor, pairs: Pairs, scale: float) -> Iterator[_Tile]:
    """Yield the tiles in which any query sees any key."""
    dtype = accumulation_dtype(q.dtype)
    table = table.to(dtype)
    for rows in _cuts(q.shape[1]):
        of_rows = pairs.queries.part(rows)
        for columns in _cuts(k.shape[1]):
            of_columns = pairs.keys.part(columns)
            seen = visible(of_rows, of_columns)[:, None]
            if not bool(seen.any()):
                continue
            buckets = pairs.formula.buckets(of_rows, of_columns, pairs.relations)
            scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows].to(dtype), k[:, columns].to(dtype)) * scale
            scores += table[buckets].permute(0, 3, 1, 2)
            yield _Tile(rows, columns, scores.masked_fill_(~seen, -torch.inf), buckets, seen)


def _product(weights: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
    """Return `[batch, queries, heads, head_dim]`, weights `[batch, heads, queries, keys]` times rows.

    A weight of 0 times NaN is NaN. So non-finite elements of `rows` `[batch, keys, heads, head_dim]` are left out of
    the product, and then make NaN only the results that see them.
    """
    lost = ~rows.isfinite()
    if not bool(lost.any()):
        return torch.einsum("bhqk,bkhd->bqhd", weights, rows)
    found = torch.einsum("bhqk,bkhd->bqhd", weights, rows.masked_fill(lost, 0.0))
    sees_lost = torch.einsum("bhqk,bkhd->bqhd", seen.to(rows.dtype).expand_as(weights), lost.to(rows.dtype)) > 0
    return found.masked_fill(sees_lost, torch.nan)


def _cuts(count: int) -> list[slice]:
    return [slice(first, min(first + _TILE, count)) for first in range(0, count, _TILE)]


def _add_by_bucket(total: Tensor, buckets: Tensor, values: Tensor) -> None:
    """Add `values` `[batch, heads, queries, keys]` to the rows of `total` `[rows, heads]` given by `buckets`
    `[batch, queries, keys]`, always in the same order.
    """
    heads = total.shape[1]
    places = buckets[:, None] * heads + torch.arange(heads, device=total.device)[:, None, None]
    flat, added = total.view(-1), values.to(total.dtype).flatten()
    if total.is_cuda:
        flat.index_put_((places.flatten(),), added, accumulate=True)  # sorts; the order of index_add_ is undefined
    else:
        flat.index_add_(0, places.flatten(), added)  # sequential
