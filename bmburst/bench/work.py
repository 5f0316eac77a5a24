"""The arithmetic of a cell: FLOPs, the sequence on which one GPU does the same work, bytes of its tensors."""

import math
from dataclasses import dataclass

from bmburst.bench.cells import Cell

BACKWARD = 2.5  # FLOPs of backward over those of forward: five products against two (arXiv:2307.08691, section 4.1)
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


def sizes(cell: Cell, tokens: int | None = None) -> Sizes:
    """Return the bytes of tensors of `tokens` tokens, by default a rank's share of the sequence."""
    rows = cell.batch * (cell.tokens // cell.ranks if tokens is None else tokens)
    item = _ITEMSIZE[cell.dtype]
    wide = max(FP32, item)
    return Sizes(
        q=rows * cell.heads * cell.head_dim * item,
        k=rows * cell.kv_heads * cell.head_dim * item,
        statistics=rows * cell.heads * wide,
        wide=wide / item,
    )


def forward_flops(cell: Cell, tokens: int | None = None) -> float:
    """Return the FLOPs of attention forward over a whole sequence: 4 B S^2 H D, a causal mask counted as half."""
    length = cell.tokens if tokens is None else tokens
    return 4.0 * cell.batch * length**2 * cell.heads * cell.head_dim * (0.5 if cell.is_causal else 1.0)


def one_gpu_tokens(cell: Cell) -> int:
    """Return the length at which one GPU has a rank's share of the FLOPs: S / sqrt(P), in whole tiles of the kernel."""
    tokens = int(cell.tokens / math.sqrt(cell.ranks))
    return tokens // _TILE * _TILE if tokens > 8 * _TILE else max(1, tokens)


def one_gpu_memory(cell: Cell) -> float:
    """Return about what the comparison on one GPU holds at its peak, in bytes: its tensors and dQ in fp32."""
    alone = sizes(cell, one_gpu_tokens(cell))
    return alone.held + alone.q * alone.wide
