"""Attention on one device: one kernel call for each tile of the schedule, under most masks a single one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.comm.waits import traced
from bmburst.schedule.tiles import Span, Tile
from bmburst_ops.flash import BackwardInputs, Gradients, Partial, Scoring
from bmburst_ops.flash.kernel import deliver_gradients, empty_gradients, empty_partial
from bmburst_ops.merge import accumulation_dtype, add_, merge_partials_


def cut(tensor: Tensor, span: Span, dim: int = 1) -> Tensor:
    """Return the tokens of a span. For all tokens return the tensor itself, since a view costs host time."""
    return tensor if len(span) == tensor.shape[dim] else tensor.narrow(dim, span.start, len(span))


def tile_forward(
    call: AttentionCall, tile: Tile, q: Tensor, k: Tensor, v: Tensor, into: Partial | None = None
) -> Partial:
    """Return attention of a tile's queries to its keys; q, k and v hold all tokens, `into` only those of the tile."""
    queries, keys, values = cut(q, tile.queries), cut(k, tile.keys), cut(v, tile.keys)
    with traced("attention tile"):
        return call.kernel.forward(queries, keys, values, _scoring(call, tile), into=into)


def tile_backward(call: AttentionCall, tile: Tile, given: BackwardInputs, into: Gradients | None = None) -> Gradients:
    """Return a tile's gradients; `given` holds all tokens, `into` only those of the tile."""
    (grad_out, q, k, v, lse, delta), rows, columns = given, tile.queries, tile.keys
    part = BackwardInputs(
        *(cut(grad_out, rows), cut(q, rows), cut(k, columns), cut(v, columns)),
        *(cut(lse, rows, 2), cut(delta, rows, 2)),
    )
    with traced("attention tile backward"):
        return call.kernel.backward(part, _scoring(call, tile), deterministic=call.deterministic, into=into)


def _scoring(call: AttentionCall, tile: Tile) -> Scoring:
    return Scoring(tile.pattern, call.scale, call.softcap)


def add_tiles(call: AttentionCall, tiles: Sequence[Tile], given: BackwardInputs, sums: Gradients) -> None:
    """Add the gradients of tiles to `sums`; `given` and `sums` hold all tokens.

    Sums of more than two terms must be in fp32 or wider, or they would be rounded at each term.
    """
    for tile in tiles:
        shares = tile_backward(call, tile, given)
        for total, span, share in zip(sums, (tile.queries, tile.keys, tile.keys), shares, strict=True):
            add_(total[:, span.slice], share)


def local_forward(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    into: Partial | None = None,
    *,
    tiles: Sequence[Tile] | None = None,
) -> Partial:
    """Return attention of this rank's queries to its own keys; queries that see none get zero and `-inf`.

    Args:
        call: The attention.
        q: `[batch, queries, heads, head_dim]`.
        k: `[batch, keys, kv_heads, head_dim]`.
        v: `[batch, keys, kv_heads, value_dim]`.
        into: Where to write the results, as `Kernel.forward`. Default: new memory, the output contiguous in q's dtype.
        tiles: The tiles to compute; no query sees keys in two of them. Default: all tiles of a call on one rank.
    """
    tiles = call.tiles(0, 0) if tiles is None else tiles
    into = empty_partial(q, v) if into is None else into
    if len(tiles) == 1 and len(tiles[0].queries) == q.shape[1]:
        tile_forward(call, tiles[0], q, k, v, into)
        return into
    out, lse = into
    done = 0  # rows from here on are not yet written
    for tile in tiles:
        rows = tile.queries.slice
        if tile.queries.start >= done:
            _write_empty(into, slice(done, tile.queries.start))
            tile_forward(call, tile, q, k, v, Partial(out[:, rows], lse[:, :, rows]))
            done = tile.queries.stop
        else:  # segments of different tiles interleave
            _write_empty(into, slice(done, tile.queries.stop))
            merge_partials_(out[:, rows], lse[:, :, rows], *tile_forward(call, tile, q, k, v))
            done = max(done, tile.queries.stop)
    _write_empty(into, slice(done, None))
    return into


def _write_empty(part: Partial, queries: slice) -> None:
    """Write the results of queries that see no key."""
    part.out[:, queries] = 0
    part.lse[:, :, queries] = -torch.inf


def local_backward(
    call: AttentionCall, given: BackwardInputs, into: Gradients | None = None, *, tiles: Sequence[Tile] | None = None
) -> Gradients:
    """Return the gradients of q, k and v, each sum rounded once; `into` and `tiles` as above."""
    tiles = call.tiles(0, 0) if tiles is None else tiles
    inputs = given.q, given.k, given.v
    if into is None:
        into = empty_gradients(*inputs)
    if len(tiles) in (1, 2):  # the sum of two terms is rounded once in any dtype
        first, *second = tiles
        _write_tile(call, first, given, into)
        add_tiles(call, second, given, into)
        return into
    sums = Gradients(*(torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in inputs))
    add_tiles(call, tiles, given, sums)
    return deliver_gradients(sums, into)


def _write_tile(call: AttentionCall, tile: Tile, given: BackwardInputs, into: Gradients) -> None:
    """Write a tile's gradients, and zero for all other tokens."""
    spans = (tile.queries, tile.keys, tile.keys)
    tile_backward(call, tile, given, Gradients(*(cut(t, span) for t, span in zip(into, spans, strict=True))))
    for gradient, span in zip(into, spans, strict=True):
        if len(span) < gradient.shape[1]:
            gradient[:, : span.start] = 0
            gradient[:, span.stop :] = 0
