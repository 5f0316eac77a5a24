"""Biased attention in Triton: head dims up to 256, fp32 and 16 bits. Its twin in plain torch is in `kernel`.

Blocks are classified on the device, once per batch, so that kernels skip masked blocks and use fast paths. Memory is
linear in the tokens, and the host never synchronizes. Importing this file needs no Triton.
"""

import math
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmburst_ops.biased.kernel import BiasedGradients, Pairs, require_inputs
from bmburst_ops.flash.kernel import BackwardInputs, Partial
from bmburst_ops.flash.triton import (
    BlockSizes,
    Side,
    Table,
    TritonKernel,
    block_sizes_for,
    blocks_of,
    launch_grid,
    near_rows,
    padded_head_dim,
    strides_of,
)


class BiasedBlockSizes(NamedTuple):
    """Block sizes of each biased attention kernel.

    `queries` and `table` use the same blocks: each block's share of the table's gradient is added by one of them. A
    block of queries is one or more whole blocks of keys.
    """

    forward: BlockSizes
    keys: BlockSizes
    queries: BlockSizes
    table: BlockSizes

    @classmethod
    def of(cls, *kernels: tuple[int, int, int, int]) -> "BiasedBlockSizes":
        """Return the sizes of the kernels in this order, each as the fields of `BlockSizes`."""
        return cls(*(BlockSizes(*each) for each in kernels))


# For head dim 128 the fastest on an H200. The others were only compiled, for sm_90 and sm_80: the first three kernels
# do not spill, the table's kernel spills at the end of a run.
_HOPPER: Table[BiasedBlockSizes] = (
    (64, BiasedBlockSizes.of((128, 64, 8, 3), (64, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2))),
    (128, BiasedBlockSizes.of((128, 64, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2))),
    (256, BiasedBlockSizes.of((128, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1))),
)
_SMALL: Table[BiasedBlockSizes] = (
    (64, BiasedBlockSizes.of((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 1))),
    (128, BiasedBlockSizes.of((128, 32, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1))),
    (256, BiasedBlockSizes.of((32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 1))),
)
_FP32: Table[BiasedBlockSizes] = (
    (64, BiasedBlockSizes.of(*[(32, 32, 8, 1)] * 4)),
    (128, BiasedBlockSizes.of(*[(32, 16, 8, 1)] * 4)),
    (256, BiasedBlockSizes.of(*[(16, 16, 8, 1)] * 4)),
)
# Uneven, so that small tensors cover every path.
_INTERPRETED: Table[BiasedBlockSizes] = ((256, BiasedBlockSizes.of(*[(32, 16, 4, 1)] * 4)),)
_AT_ONCE = 256  # table entries, or sums of their gradients, that one program converts
_NUMBERS = 8192  # matrix elements that one program reads to find the largest row
_BLOCKS_AT_ONCE = 64  # blocks of a line that are classified together
_MOST = 128


class BiasedTritonKernel:
    """`BiasedKernel` in Triton for Ampere or newer, and for CPUs in Triton's interpreter, which is for tests.

    Args:
        sizes: Block sizes of the kernels; default: those for the device and the head dim.
        most: Most runs of a line.
    """

    name = "triton"

    def __init__(self, sizes: BiasedBlockSizes | None = None, most: int = _MOST) -> None:
        self._sizes, self._most = sizes, most

    def refusal(self, q: Tensor) -> str | None:
        """See `BiasedKernel.refusal`."""
        return TritonKernel().refusal(q, q)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, pairs: Pairs, *, scale: float) -> Partial:
        """See `BiasedKernel.forward`. The output is in q's dtype."""
        require_inputs(q, k, v, table, pairs)
        q, k, v = (near_rows(t) for t in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        sizes, looked_up = (self._sizes or _block_sizes(q)).forward, pairs.lookup()
        runs = line_runs(pairs, sizes.over_keys, self._most).runs
        strides, numbers = map(strides_of, (q, k, v, out)), (q.shape[1], k.shape[1], scale / math.log(2))
        biases = _biases(table, pairs)
        arguments = (q, k, v, out, lse, *strides, *numbers, *pairs.packed(), *runs, biases, *looked_up)
        launch_grid(_kernels().forward, q, blocks_of(q, sizes.queries), arguments, sizes, RUNS=runs.most)
        return Partial(out, lse)

    def backward(
        self, given: BackwardInputs, table: Tensor, pairs: Pairs, *, scale: float, rounded: bool = False
    ) -> BiasedGradients:
        """See `BiasedKernel.backward`. Gradients are fp32 unless `rounded`."""
        require_inputs(*given[1:4], table, pairs)
        (grad_out, q, k, v), (lse, delta) = map(near_rows, given[:4]), given[4:]
        grad_q, grad_k, grad_v, grad_table = grads = BiasedGradients(
            *(
                torch.empty(t.shape, dtype=t.dtype if rounded else torch.float32, device=t.device)
                for t in (q, k, v, table)
            )
        )
        if not q.numel() or not k.numel():
            for grad in grads:
                grad.zero_()
            return grads
        kernels, sizes = _kernels(), self._sizes or _block_sizes(q)
        found = _biases(table, pairs), *pairs.lookup()
        packed, inputs = pairs.packed(), (grad_out, q, k, v, lse, delta)
        read = tuple(map(strides_of, (grad_out, q, k, v, lse.transpose(1, 2), delta.transpose(1, 2))))
        lengths, scales = (q.shape[1], k.shape[1]), (scale, scale / math.log(2))
        sums, bits = no_sums(grad_out, v, delta, pairs.formula.rows)

        runs = line_runs(pairs, sizes.keys.over_queries, self._most).runs
        written = (strides_of(grad_k), strides_of(grad_v))
        arguments = (*inputs, grad_k, grad_v, *read, *written, *lengths, *scales, *packed, *runs, *found)
        launch_grid(kernels.keys, k, blocks_of(k, sizes.keys.keys), arguments, sizes.keys, RUNS=runs.most)

        lines = line_runs(pairs, sizes.queries.over_keys, self._most)
        runs = lines.runs
        arguments = (*inputs, grad_q, sums, bits, *read, strides_of(grad_q), *lengths, *scales, *packed, *runs, *found)
        launch_grid(kernels.queries, q, blocks_of(q, sizes.queries.queries), arguments, sizes.queries, RUNS=runs.most)

        runs = diagonal_runs(pairs, sizes.table.over_keys, self._most)
        runs_and_lines = (*runs, *lines[1:], *lines.runs)
        arguments = (*inputs, sums, bits, *read, *lengths, scales[1], *packed, *runs_and_lines, *found)
        launch_grid(kernels.table, q, runs.counts.shape[1], arguments, sizes.table, RUNS=runs.most)
        as_numbers(sums, bits, grad_table)
        return grads


class _Kernels(NamedTuple):
    forward: Any
    keys: Any
    queries: Any
    table: Any
    biases: Any


@cache
def _kernels() -> _Kernels:
    """Import Triton and the kernels at first use. TRITON_INTERPRET is read at that time."""
    from bmburst_ops.biased.triton_attention import forward_kernel, keys_kernel, queries_kernel
    from bmburst_ops.biased.triton_bias import biases_kernel, table_kernel

    return _Kernels(forward_kernel, keys_kernel, queries_kernel, table_kernel, biases_kernel)


def _block_sizes(q: Tensor) -> BiasedBlockSizes:
    """Return the block sizes of each kernel for these queries on this device."""
    return block_sizes_for(q, _kernels().forward, hopper=_HOPPER, small=_SMALL, fp32=_FP32, interpreted=_INTERPRETED)


def _biases(table: Tensor, pairs: Pairs) -> Tensor:
    """Return the biases of each head, in units of log 2: first for each row of the table, then for each distance."""
    *_, distances, max_distance, _, rows = pairs.lookup()
    heads, width = table.shape[1], rows + 2 * max_distance + 1
    biases = torch.empty(heads, width, dtype=torch.float32, device=table.device)
    if heads:
        with torch.cuda.device_of(table):
            _kernels().biases[(-(-width // _AT_ONCE), heads)](
                table, biases, *table.stride(), distances, max_distance, rows, AT_ONCE=_AT_ONCE
            )
    return biases


def no_sums(grad_out: Tensor, v: Tensor, delta: Tensor, rows: int) -> tuple[Tensor, int]:
    """Return zeroed integer accumulators for the table's gradient, and their number of bits.

    `triton_bias` describes the fixed-point format. The host does not wait. A NaN or infinity in the inputs makes
    the whole gradient non-finite.

    Args:
        grad_out: dO, `[batch, queries, heads, head_dim]`; all tensors have dense rows and are not empty.
        v: `[batch, keys, heads, head_dim]`.
        delta: `[batch, heads, queries]`.
        rows: Number of rows of the table.

    Returns:
        int64 `[heads * rows + PEAKS]`; the last `PEAKS` elements determine the unit. And the number of bits.
    """
    from bmburst_ops.biased.triton_bias import FREE_BITS, PEAKS, peaks_kernel

    batch, queries, heads, head_dim = grad_out.shape
    dim, keys = padded_head_dim(head_dim), v.shape[1]
    sums = torch.zeros(heads * rows + PEAKS, dtype=torch.int64, device=v.device)
    tokens = _NUMBERS // dim
    strides = map(strides_of, (grad_out, v, delta.transpose(1, 2)))
    with torch.cuda.device_of(v):
        peaks_kernel[(-(-max(queries, keys) // tokens), heads, batch)](
            *(grad_out, v, delta, sums, *strides, queries, keys, rows), HEAD_DIM=head_dim, DIM=dim, TOKENS=tokens
        )
    return sums, FREE_BITS - math.ceil(math.log2(batch * queries))


def as_numbers(sums: Tensor, bits: int, numbers: Tensor) -> None:
    """Convert the integer sums to floating point and write them to `numbers`, `[rows, heads]`, dense, not empty."""
    from bmburst_ops.biased.triton_bias import numbers_kernel

    programs = -(-numbers.numel() // _AT_ONCE)
    with torch.cuda.device_of(sums):
        numbers_kernel[(programs,)](sums, bits, numbers, *numbers.shape, AT_ONCE=_AT_ONCE)


Cut = tuple[Side, int, int]
"""The side whose blocks a kernel's programs hold, tokens per block, and tokens per block of the other side."""


class Runs(NamedTuple):
    """Runs of blocks on each line; see `triton_blocks`.

    Attributes:
        runs: int32 `[batch, lines, most, 3]`: the first block, the one after the last, and their kind.
        counts: int32 `[batch, lines]`: the number of runs.
    """

    runs: Tensor
    counts: Tensor

    @property
    def most(self) -> int:
        """Capacity: the most runs of a line."""
        return self.runs.shape[2]


class Lines(NamedTuple):
    """The runs of one line per block of one side, and the extents that determine the kinds."""

    runs: Runs
    query_extents: Tensor
    key_extents: Tensor


def line_runs(pairs: Pairs, cut: Cut, most: int = _MOST) -> Lines:
    """Return the runs of a kernel that loops over lines of blocks.

    Args:
        pairs: The queries and the keys.
        cut: How they are divided into blocks.
        most: Capacity of runs per line.
    """
    found = pairs.once.get(("lines", cut, most), partial(_make_lines, pairs, cut, most))
    return Lines(Runs(*found[:2]), *found[2:])


def diagonal_runs(pairs: Pairs, cut: Cut, most: int) -> Runs:
    """Return the runs of the kernel that loops along diagonals of blocks. Neither side may be empty.

    Args:
        pairs: The queries and the keys.
        cut: How lines of queries are divided into blocks; a block of queries is one or more whole blocks of keys.
        most: As in `line_runs`, with the same value.
    """
    return Runs(*pairs.once.get(("diagonals", cut, most), partial(_make_diagonals, pairs, cut, most)))


def extents(pairs: Pairs, side: Side, size: int) -> Tensor:
    """Return the extents of a side's blocks of `size` tokens, int32 `[batch, blocks, triton_blocks.NUMBERS]`."""
    name = "queries" if pairs.keys is pairs.queries else side
    return pairs.once.get(("extents", name, size), partial(_make_extents, pairs, side, size))[0]


def _make_lines(pairs: Pairs, cut: Cut, most: int) -> tuple[Tensor, ...]:
    from bmburst_ops.biased.triton_blocks import lines_kernel

    own = extents(pairs, *cut[:2])
    other = extents(pairs, "keys" if cut[0] == "queries" else "queries", cut[2])
    of_queries = cut[0] == "queries"
    query_extents, key_extents = (own, other) if of_queries else (other, own)
    runs = _room(own, own.shape[1], most)
    if not other.shape[1]:
        runs.counts.zero_()
    elif own.shape[1] and own.shape[0]:
        with torch.cuda.device_of(own):
            lines_kernel[(own.shape[1], own.shape[0])](
                query_extents,
                key_extents,
                *runs,
                query_extents.shape[1],
                key_extents.shape[1],
                *pairs.lookup(),
                OF_QUERIES=of_queries,
                RUNS=most,
                AT_ONCE=_BLOCKS_AT_ONCE,
                num_warps=2,
            )
    return *runs, query_extents, key_extents


def _make_diagonals(pairs: Pairs, cut: Cut, most: int) -> tuple[Tensor, ...]:
    from bmburst_ops.biased.triton_blocks import diagonals_kernel

    lines = line_runs(pairs, cut, most)
    query_blocks, key_blocks, ratio = lines.query_extents.shape[1], lines.key_extents.shape[1], cut[1] // cut[2]
    runs = _room(lines.query_extents, ratio * (query_blocks - 1) + key_blocks, most)
    with torch.cuda.device_of(runs.runs):
        diagonals_kernel[(runs.runs.shape[1], runs.runs.shape[0])](
            *lines[1:],
            *lines.runs,
            *runs,
            query_blocks,
            key_blocks,
            *pairs.lookup(),
            RATIO=ratio,
            RUNS=most,
            AT_ONCE=_BLOCKS_AT_ONCE,
            num_warps=2,
        )
    return runs


def _make_extents(pairs: Pairs, side: Side, size: int) -> tuple[Tensor, ...]:
    from bmburst_ops.biased.triton_blocks import NUMBERS, extents_kernel

    packed = pairs.packed()[side == "keys"]
    _, batch, tokens = packed.shape
    blocks = -(-tokens // size)
    found = packed.new_empty(batch, blocks, NUMBERS)
    if found.numel():
        with torch.cuda.device_of(found):
            extents_kernel[(blocks, batch)](packed, found, tokens, SIZE=size, num_warps=1)
    return (found,)


def _room(like: Tensor, lines: int, most: int) -> Runs:
    """Return memory for the runs of `lines` lines per sample of a batch."""
    batch = like.shape[0]
    return Runs(like.new_empty(batch, lines, most, 3), like.new_empty(batch, lines))
