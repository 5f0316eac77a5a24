"""One tile of a rank's queries and some keys: the kernel call that it is."""

from collections.abc import Sequence

from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.schedule.tiles import Span, Tile
from bmburst.trace import traced
from bmburst_ops.flash import Given, Gradients, Kernel, Partial
from bmburst_ops.merge import add_


def cut(tensor: Tensor, span: Span, dim: int = 1) -> Tensor:
    """Return the tokens of a span; all of them are the tensor itself, since a view costs the host time."""
    return tensor if len(span) == tensor.shape[dim] else tensor.narrow(dim, span.start, len(span))


def tile_forward(
    call: AttentionCall, tile: Tile, q: Tensor, k: Tensor, v: Tensor, into: Partial | None = None
) -> Partial:
    """Return attention of a tile's queries to its keys; `q`, `k` and `v` hold all tokens, `into` the tile's."""
    queries, keys, values = cut(q, tile.queries), cut(k, tile.keys), cut(v, tile.keys)
    with traced("attention tile"):
        return call.kernel.forward(queries, keys, values, pattern=tile.pattern, scale=call.scale, into=into)


def tile_backward(
    call: AttentionCall, kernel: Kernel, tile: Tile, given: Given, into: Gradients | None = None
) -> Gradients:
    """Return a tile's gradients; what is given holds all tokens, `into` the tile's."""
    (grad_out, q, k, v, lse, delta), rows, columns = given, tile.queries, tile.keys
    part = Given(
        *(cut(grad_out, rows), cut(q, rows), cut(k, columns), cut(v, columns)),
        *(cut(lse, rows, 2), cut(delta, rows, 2)),
    )
    with traced("attention tile backward"):
        return kernel.backward(
            part, pattern=tile.pattern, scale=call.scale, deterministic=call.deterministic, into=into
        )


def add_tiles(call: AttentionCall, kernel: Kernel, tiles: Sequence[Tile], given: Given, sums: Gradients) -> None:
    """Add the gradients of tiles to running ones, fp32 or wider, which hold all tokens as what is given does."""
    for tile in tiles:
        shares = tile_backward(call, kernel, tile, given)
        for total, span, share in zip(sums, (tile.queries, tile.keys, tile.keys), shares, strict=True):
            add_(total[:, span.slice], share)
