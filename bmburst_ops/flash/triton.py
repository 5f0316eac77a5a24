"""bmburst's flash attention in Triton: any head dims up to 256, also fp32, and a backward that takes delta.

Masks, block sizes and launches are shared with the other attention kernels in Triton. Importing this file needs no
Triton.
"""

import math
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmburst_ops.bounded_cache import bounded_cache
from bmburst_ops.flash.inputs import DeviceVectors, copy_to_device, unless_ampere
from bmburst_ops.flash.kernel import BackwardInputs, Gradients, Kernel, Partial, Scoring
from bmburst_ops.machine import HERE, Machine
from bmburst_ops.pattern import (
    CAUSAL,
    FULL,
    Band,
    Cells,
    IntArray,
    Need,
    Pattern,
    VisibleRanges,
    cell_of,
    transposed,
    visible_ranges,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NARROWEST_OF_TWO = 64
"""Padded head dims, below which two are wrong: 24 beside 16 and 16 beside 64 were, 64 beside 16 was not."""
_MAX_HEAD_DIM = 256
_MAX_ROW_STRIDE = 2**31 // 256  # offsets inside a block of up to 256 rows are 32 bits wide
_CHUNK = 2**22  # tiles classified at once

Side = Literal["queries", "keys"]


class MaskArguments(NamedTuple):
    """Mask arguments of a kernel, in its order of arguments; None for those that it does not read."""

    kind: Literal["full", "causal", "rows", "cells"]
    starts: Tensor | None = None
    """For each token of the kernel's side, the first visible token of the other side; int32, as all of these."""
    stops: Tensor | None = None
    """The token after the last visible one."""
    query_cells: Tensor | None = None
    """The cell of each query."""
    key_cells: Tensor | None = None
    cells: Tensor | None = None
    """Whether a cell is on, `[rows of cells, columns]`, flat."""
    cell_columns: int = 0
    tiles: Tensor | None = None
    """For each block of the kernel's side, the first tokens of the visible blocks: wholly visible ones, then others."""
    tile_ends: Tensor | None = None
    """Where these two lists start in `tiles`: two numbers per block, and the end."""


def mask_arguments(pattern: Pattern, q: Tensor, k: Tensor, side: Side, rows: int, columns: int) -> MaskArguments:
    """Return the mask of a kernel whose programs hold `rows` tokens of a side and loop over `columns` of the other."""
    queries, keys, device = q.shape[1], k.shape[1], q.device
    if isinstance(pattern, Band):
        pattern = pattern.within(queries, keys)
        if pattern == FULL:
            return MaskArguments("full")
        if pattern == CAUSAL and queries <= keys:
            return MaskArguments("causal")
    starts, stops = _intervals(pattern, queries, keys, side, device).here()
    if not isinstance(pattern, Cells):
        return MaskArguments("rows", starts, stops)
    query_cells, key_cells, cells = _cells(pattern, queries, keys, device).here()
    tiles, ends = _tiles(pattern, queries, keys, side, rows, columns, device).here()
    return MaskArguments("cells", starts, stops, query_cells, key_cells, cells, pattern.cells.shape[1], tiles, ends)


@bounded_cache(maxsize=64)
def _intervals(pattern: Pattern, queries: int, keys: int, side: Side, device: torch.device) -> DeviceVectors:
    return copy_to_device(_rows(pattern, queries, keys, side), device)


@bounded_cache(maxsize=64)
def _cells(pattern: Cells, queries: int, keys: int, device: torch.device) -> DeviceVectors:
    places = cell_of(pattern.query_edges, 0, queries), cell_of(pattern.key_edges, 0, keys)
    return copy_to_device((*places, pattern.cells), device)


@bounded_cache(maxsize=64)
def _tiles(
    pattern: Cells, queries: int, keys: int, side: Side, rows: int, columns: int, device: torch.device
) -> DeviceVectors:
    cells = pattern.cells
    places = cell_of(pattern.query_edges, 0, queries), cell_of(pattern.key_edges, 0, keys)
    if side == "keys":
        cells, places = cells.T, (places[1], places[0])
    return copy_to_device(tile_lists(_rows(pattern, queries, keys, side), *places, cells, rows, columns), device)


def _rows(pattern: Pattern, queries: int, keys: int, side: Side) -> VisibleRanges:
    rows = visible_ranges(pattern, queries, keys)
    return rows if side == "queries" else transposed(rows, keys)


def tile_lists(
    seen: VisibleRanges, row_cells: IntArray, column_cells: IntArray, cells: NDArray[np.bool_], rows: int, columns: int
) -> tuple[IntArray, IntArray]:
    """Return `tiles` and `tile_ends` of `MaskArguments`, for blocks of `rows` and `columns` tokens.

    A tile is listed if any of its cells is on and the interval of any of its rows reaches into it. It is open if all
    its cells are on and all its rows see its whole width. Cells that are on are counted with a summed-area table.
    """
    row_first, row_last = _blocks(len(row_cells), rows)
    first, last = _blocks(len(column_cells), columns)
    sums = np.pad(cells.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    left, right = column_cells[first], column_cells[last] + 1
    order, tiles = [], []
    step = max(1, _CHUNK // max(1, len(first)))
    for at in range(0, len(row_first), step):
        top_row, bottom_row = (side[at : at + step, None] for side in (row_first, row_last))
        top, bottom = row_cells[top_row], row_cells[bottom_row] + 1
        on = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
        listed = (on > 0) & (first < seen.stop[bottom_row]) & (last >= seen.start[top_row])
        is_open = listed & (on == (bottom - top) * (right - left))
        is_open &= (first >= seen.start[bottom_row]) & (first + columns <= seen.stop[top_row])
        block, column = np.nonzero(listed)
        order.append((block + at) * 2 + ~is_open[block, column])
        tiles.append(first[column])
    if not tiles:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    places = np.concatenate(order)
    counts = np.bincount(places, minlength=2 * len(row_first))
    ends = np.concatenate((np.zeros(1, np.int64), counts.cumsum()))
    return np.concatenate(tiles)[np.argsort(places, kind="stable")], ends


def _blocks(count: int, size: int) -> tuple[IntArray, IntArray]:
    """Return the first and the last token of each block."""
    first = np.arange(0, count, size)
    return first, np.minimum(first + size, count) - 1


class BlockSizes(NamedTuple):
    """Launch configuration of a kernel: queries and keys of a tile, warps, and software pipelining stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def over_keys(self) -> tuple[Side, int, int]:
        """For programs that hold queries: their side, its rows per block, and those of the other side."""
        return "queries", self.queries, self.keys

    @property
    def over_queries(self) -> tuple[Side, int, int]:
        """The same for programs that hold keys."""
        return "keys", self.keys, self.queries


class FlashBlockSizes(NamedTuple):
    """Block sizes of each flash attention kernel; `keys` and `queries` are the two kernels of backward."""

    forward: BlockSizes
    keys: BlockSizes
    queries: BlockSizes


P = TypeVar("P")
Table = tuple[tuple[int, P], ...]
"""Block sizes with the largest padded head dim that each entry supports."""


def block_sizes_for(
    q: Tensor,
    kernel: Any,
    *,
    hopper: Table[P],
    small: Table[P],
    fp32: Table[P],
    interpreted: Table[P],
    machine: Machine = HERE,
) -> P:
    """Return the block sizes of kernels for queries `[batch, queries, heads, head_dim]` on their device.

    Args:
        q: The queries.
        kernel: One of the kernels, as returned by `triton.jit`.
        hopper: For 16-bit dtypes, with up to 192 KiB of shared memory.
        small: For 16-bit dtypes, with up to 72 KiB of shared memory: any GPU from Ampere on.
        fp32: For fp32, without tensor cores: operands of products are in registers.
        interpreted: For Triton's interpreter.
        machine: The machine of the device.
    """
    table = interpreted
    if not is_interpreted(kernel):
        has_much = machine.capability(q.device)[0] in (9, 10)  # shared memory; 12 has less again
        table = fp32 if q.dtype == torch.float32 else hopper if has_much else small
    return next(sizes for largest, sizes in table if padded_head_dim(q.shape[-1]) <= largest)


class Kernels(NamedTuple):
    """The kernels of one attention, as returned by `triton.jit`: compiled or interpreted."""

    forward: Any
    keys: Any
    queries: Any


def launch_grid(
    kernel: Any, side: Tensor, programs: int, arguments: tuple[Any, ...], blocks: BlockSizes, **constants: Any
) -> None:
    """Launch a kernel with `programs` programs for each head and batch of a side, the queries or the keys.

    Args:
        kernel: The kernel, as returned by `triton.jit`.
        side: `[batch, tokens, heads, head_dim]`; if it is empty, nothing is launched.
        programs: Number of programs per head and batch.
        arguments: Positional arguments of the kernel.
        blocks: Block sizes of the kernel.
        constants: Compile-time constants besides head dim, block sizes and precision.
    """
    batch, _, heads, head_dim = side.shape
    if not batch * heads * programs:
        return
    precision = "interpreter" if is_interpreted(kernel) else "ieee" if side.dtype == torch.float32 else "tf32"
    with torch.cuda.device_of(side):  # Triton launches on the current device, wherever the tensors are
        kernel[(programs, heads, batch)](
            *arguments,
            HEAD_DIM=head_dim,
            DIM=padded_head_dim(head_dim),
            QUERIES=blocks.queries,
            KEYS=blocks.keys,
            PRECISION=precision,
            **constants,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def is_interpreted(kernel: Any) -> bool:
    """Return whether a kernel runs in Triton's interpreter: TRITON_INTERPRET was read when it was imported."""
    import triton

    return not isinstance(kernel, triton.JITFunction)


def blocks_of(side: Tensor, rows: int) -> int:
    """Return the number of blocks of `rows` tokens on a side."""
    return -(-side.shape[1] // rows)


def widths_of(v: Tensor) -> dict[str, int]:
    """Return the compile-time constants for values `[batch, keys, kv_heads, value_dim]`, which may have own widths."""
    return {"VALUE_HEAD_DIM": v.shape[-1], "VALUE_DIM": padded_head_dim(v.shape[-1])}


def padded_head_dim(head_dim: int) -> int:
    """Return the power of two to which a head dim is padded; Triton's products need at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


_HOPPER: Table[FlashBlockSizes] = (  # compiled for sm_90, each spills less than 100 bytes per thread
    (64, FlashBlockSizes(BlockSizes(128, 128, 8, 3), BlockSizes(64, 128, 8, 2), BlockSizes(128, 64, 8, 3))),
    (128, FlashBlockSizes(BlockSizes(128, 64, 8, 3), BlockSizes(32, 128, 8, 3), BlockSizes(128, 64, 8, 2))),
    (256, FlashBlockSizes(BlockSizes(128, 64, 8, 2), BlockSizes(32, 64, 8, 2), BlockSizes(64, 64, 8, 2))),
)
_SMALL: Table[FlashBlockSizes] = (
    (64, FlashBlockSizes(BlockSizes(128, 64, 4, 2), BlockSizes(64, 64, 4, 2), BlockSizes(128, 64, 8, 2))),
    (128, FlashBlockSizes(BlockSizes(128, 32, 8, 2), BlockSizes(32, 64, 8, 2), BlockSizes(64, 32, 4, 2))),
    (256, FlashBlockSizes(BlockSizes(64, 32, 8, 2), BlockSizes(16, 32, 4, 1), BlockSizes(32, 32, 4, 1))),
)
_FP32: Table[FlashBlockSizes] = (
    (64, FlashBlockSizes(*[BlockSizes(32, 32, 4, 1)] * 3)),
    (256, FlashBlockSizes(*[BlockSizes(16, 16, 4, 1)] * 3)),
)
# Small and uneven, so that small tensors in tests cover every path.
_INTERPRETED: Table[FlashBlockSizes] = (
    (256, FlashBlockSizes(BlockSizes(32, 16, 4, 1), BlockSizes(16, 32, 4, 1), BlockSizes(32, 16, 4, 1))),
)


class TritonKernel(Kernel):
    """`Kernel` in Triton for Ampere or newer, and for CPUs in Triton's interpreter, which is for tests.

    Gradients are fp32, or in the dtype of `into`. Every call is deterministic.
    """

    name = "triton"
    takes_delta = True

    def refusal(self, q: Tensor, k: Tensor, needs: frozenset[Need] = frozenset()) -> str | None:
        """See `Kernel.refusal`."""
        del k, needs
        if not self._machine.has("triton"):
            return "needs Triton, which is not installed: pip install 'triton>=3.6'"
        if q.dtype not in _DTYPES:
            return f"takes float32, bfloat16 and float16 only, got {q.dtype}"
        if q.shape[-1] > _MAX_HEAD_DIM:
            return f"takes head dims up to {_MAX_HEAD_DIM}, got {q.shape[-1]}"
        if q.device.type == "cuda":
            return unless_ampere(q, self._machine)
        if q.device.type == "cpu" and is_interpreted(_kernels().forward):
            return None
        return f"runs on NVIDIA GPUs, or with TRITON_INTERPRET=1 on CPUs, and the tensors are on {q.device}"

    def takes_widths(self, q: Tensor, k: Tensor, value_dim: int, needs: frozenset[Need] = frozenset()) -> bool:
        """See `Kernel.takes_widths`. On GPUs not narrow ones: Triton 3.6 compiles them to wrong results on H200s."""
        del k, needs
        narrowest = padded_head_dim(min(q.shape[-1], value_dim))
        return narrowest >= _NARROWEST_OF_TWO or is_interpreted(_kernels().forward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, into: Partial | None = None) -> Partial:
        """See `Kernel.forward`. The output is in q's dtype, the log-sum-exp in fp32, or both in `into`'s."""
        pattern, scale, softcap = scoring
        if scale < 0:  # the kernel takes the maximum of unscaled products
            q, scale = -q, -scale
        q, k, v = (near_rows(t) for t in (q, k, v))
        batch, queries, heads, _ = q.shape
        out, lse = into or (
            torch.empty(batch, queries, heads, v.shape[3], dtype=q.dtype, device=q.device),
            torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device),
        )
        kernels, blocks = _kernels(), _block_sizes(q, v).forward
        mask = mask_arguments(pattern, q, k, *blocks.over_keys)
        numbers = (*_lengths(q, k), scale / math.log(2), cap_of(softcap, scale))
        strides = (*map(strides_of, (q, k, v, out)), *lse.stride()[:2])
        arguments = (q, k, v, out, lse, *strides, *numbers, *mask[1:])
        launch_grid(kernels.forward, q, blocks_of(q, blocks.queries), arguments, blocks, MASK=mask.kind, **widths_of(v))
        return Partial(out, lse)

    def backward(
        self, given: BackwardInputs, scoring: Scoring, *, deterministic: bool, into: Gradients | None = None
    ) -> Gradients:
        """See `Kernel.backward`. A query that saw no key (log-sum-exp `-inf`) contributes no gradient."""
        del deterministic  # always deterministic
        pattern, scale, softcap = scoring
        (grad_out, q, k, v), (lse, delta) = map(near_rows, given[:4]), given[4:]
        grads = into or Gradients(*(torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v)))
        inputs = (grad_out, q, k, v, lse, delta)
        strides = tuple(map(strides_of, (grad_out, q, k, v, lse.transpose(1, 2), delta.transpose(1, 2))))
        numbers = (*_lengths(q, k), scale, scale / math.log(2), cap_of(softcap, scale))
        kernels, sizes = _kernels(), _block_sizes(q, v)
        blocks = sizes.keys
        mask = mask_arguments(pattern, q, k, *blocks.over_queries)
        arguments = (*inputs, *grads[1:], *strides, *map(strides_of, grads[1:]), *numbers, *mask[1:])
        launch_grid(kernels.keys, k, blocks_of(k, blocks.keys), arguments, blocks, MASK=mask.kind, **widths_of(v))
        blocks = sizes.queries
        mask = mask_arguments(pattern, q, k, *blocks.over_keys)
        arguments = (*inputs, grads.q, *strides, strides_of(grads.q), *numbers, *mask[1:])
        launch_grid(kernels.queries, q, blocks_of(q, blocks.queries), arguments, blocks, MASK=mask.kind, **widths_of(v))
        return grads


def _block_sizes(q: Tensor, v: Tensor) -> FlashBlockSizes:
    """Return the block sizes of each kernel for these inputs on this device: those of the wider ones."""
    wider = max(q, v, key=lambda tensor: tensor.shape[-1])
    return block_sizes_for(
        wider, _kernels().forward, hopper=_HOPPER, small=_SMALL, fp32=_FP32, interpreted=_INTERPRETED
    )


@cache
def _kernels() -> Kernels:
    """Import Triton and the kernels at first use. TRITON_INTERPRET is read at that time."""
    from bmburst_ops.flash.triton_backward import keys_kernel, queries_kernel
    from bmburst_ops.flash.triton_forward import forward_kernel

    return Kernels(forward_kernel, keys_kernel, queries_kernel)


def _lengths(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """Return the number of queries, of keys, and of query heads per KV head."""
    return q.shape[1], k.shape[1], q.shape[2] // k.shape[2]


def cap_of(softcap: float | None, scale: float) -> float | None:
    """Return the softcap divided by the scale: the kernels cap products before they scale them."""
    return None if softcap is None else softcap / scale


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Strides of (batch, token, head)."""
    return tensor.stride()[:3]


def near_rows(tensor: Tensor) -> Tensor:
    """Return the tensor if its rows are dense and close enough for 32-bit offsets, else a copy."""
    return tensor if tensor.stride(-1) == 1 and tensor.stride(1) <= _MAX_ROW_STRIDE else tensor.contiguous()
