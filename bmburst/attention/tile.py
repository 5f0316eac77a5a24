"""One tile of a rank's queries and some keys: the kernel call that it is."""

from torch import Tensor

from bmburst.attention.call import AttentionCall
from bmburst.tiles import Tile
from bmburst.trace import traced
from bmburst_ops.flash import Gradients, Kernel, Partial


def tile_forward(
    call: AttentionCall, tile: Tile, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
) -> Partial:
    """Return attention of a tile's queries to its keys; `q`, `k` and `v` hold all tokens, `out` the tile's."""
    rows, columns = tile.queries.slice, tile.keys.slice
    with traced("attention tile"):
        return call.kernel.forward(
            q[:, rows], k[:, columns], v[:, columns], pattern=tile.pattern, scale=call.scale, out=out
        )


def tile_backward(
    call: AttentionCall,
    kernel: Kernel,
    tile: Tile,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    into: Gradients | None = None,
) -> Gradients:
    """Return a tile's gradients; the tensors hold all tokens, `into` the tile's."""
    rows, columns = tile.queries.slice, tile.keys.slice
    with traced("attention tile backward"):
        return kernel.backward(
            *(grad_out[:, rows], q[:, rows], k[:, columns], v[:, columns], lse[:, :, rows], delta[:, :, rows]),
            pattern=tile.pattern,
            scale=call.scale,
            deterministic=call.deterministic,
            into=into,
        )
