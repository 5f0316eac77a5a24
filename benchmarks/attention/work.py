"""The arithmetic of a cell: FLOPs, what one GPU does of the same work, bytes of its tensors."""

import math
from dataclasses import dataclass, replace

from benchmarks.attention.cells import PLAIN_MASKS, Cell
from benchmarks.attention.masks import visible_pairs

_TILE = 128  # rows of a kernel's block: a sequence that ends inside one would cost one GPU more than its FLOPs
_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FP32 = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one rank's tensors.

    Attributes:
        q: Of q, and of the output.
        k: Of k, and of v.
        statistics: Of a number a query and head, in fp32.
        wide: fp32 over the cell's item size: the factor for what accumulates.
    """

    q: int
    k: int
    statistics: int
    wide: float

    @property
    def held(self) -> int:
        """q, k, v, the output and the gradients of all four."""
        return 4 * self.q + 4 * self.k


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank receives: in forward, and in forward and backward together."""

    forward: float
    forward_backward: float


def sizes(cell: Cell) -> Sizes:
    """Return the bytes of the tensors of a rank's share of the sequence."""
    rows = cell.batch * (cell.tokens // cell.ranks)
    item = _ITEMSIZE[cell.dtype]
    wide = max(FP32, item)
    return Sizes(
        q=rows * cell.heads * cell.head_dim * item,
        k=rows * cell.kv_heads * cell.head_dim * item,
        statistics=rows * cell.heads * wide,
        wide=wide / item,
    )


def forward_flops(cell: Cell) -> float:
    """Return the FLOPs of attention forward over a whole sequence: 4 B H D for every pair that is seen."""
    return 4.0 * cell.batch * visible_pairs(cell.mask, cell.tokens) * cell.heads * cell.head_dim


def alone(cell: Cell) -> Cell:
    """Return what one GPU computes beside a method: a rank's share of the FLOPs.

    Under a causal or full mask a sequence of S / sqrt(P), in whole tiles of the kernel. Under the others the same
    sequence, with the same documents or window, for a P-th of the heads: all documents are as long as those of the
    ranks, and no sample of them has a P-th of the pairs where the longest has more. Heads that do not divide evenly are
    rounded down, and no KV head is left without a query head: rates are compared, not times.
    """
    if cell.mask in PLAIN_MASKS:
        return replace(cell, ranks=1, tokens=_whole_tiles(cell.tokens / math.sqrt(cell.ranks)))
    kv_heads = max(1, cell.kv_heads // cell.ranks)
    heads = kv_heads * max(1, cell.heads // cell.ranks // kv_heads)
    return replace(cell, ranks=1, heads=heads, kv_heads=kv_heads)


def plain_causal(cell: Cell) -> Cell:
    """Return a causal sequence of all heads that has a rank's share of the FLOPs, in whole tiles of the kernel.

    Its rate is that of the arithmetic: of one GPU's kernel where neither documents nor a window cut its work short.
    """
    tokens = math.sqrt(2 * visible_pairs(cell.mask, cell.tokens) / cell.ranks)
    return replace(cell, ranks=1, mask="causal", tokens=_whole_tiles(tokens))


def one_gpu_memory(cell: Cell) -> float:
    """Return about what the comparison on one GPU holds at its peak, in bytes: its tensors and dQ in fp32."""
    others = (alone(cell),) if cell.mask in PLAIN_MASKS else (alone(cell), plain_causal(cell))
    return sum(own.held + own.q * own.wide for own in map(sizes, others))


def _whole_tiles(tokens: float) -> int:
    return int(tokens) // _TILE * _TILE if tokens > 8 * _TILE else max(1, int(tokens))
