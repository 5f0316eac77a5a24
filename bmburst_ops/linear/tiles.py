"""What the Triton kernels of recurrences share: sizes of tiles and of memory, and where the tiles of a chunk lie."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmburst_ops.fragments import CHUNK

COLUMNS = 64
"""Columns of a state for a program."""
WIDE = 128
"""Wider keys take more warps."""
SCRATCH = 32 << 10
"""Bytes of shared memory for other things than loads."""
ROOM = 96 << 10
"""Bytes of shared memory for loads of wide keys in wide blocks; Ada and consumers' GPUs have less."""


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; 0 on a CPU, in Triton's interpreter."""
    if device.type == "cpu":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def room_for_loads(keys: Tensor) -> int:
    """Return the bytes of shared memory that loads of a program may take."""
    return shared_memory(keys.device) - SCRATCH


def columns_of_states(keys: Tensor) -> int:
    """Return the columns of a state for a program of the delta kinds: half where keys are wide and memory is small."""
    return COLUMNS // 2 if keys.shape[3] > WIDE and room_for_loads(keys) < ROOM else COLUMNS


def kernel_sizes(
    keys: Tensor, values: Tensor, *, tiles: int, narrow: int, stages: int, columns: int = COLUMNS
) -> dict[str, int]:
    """Return the constants of a kernel.

    Args:
        keys: Keys, `[1, tokens, key_heads, key_dim]`.
        values: Values, or a tensor of their shape, `[1, tokens, heads, value_dim]`.
        tiles: How many tiles of 64 rows as wide as a key a stage loads.
        narrow: How many tiles as wide as a block of columns it loads too.
        stages: Stages of loads in flight, the fastest number on an H200; fewer where shared memory is small.
        columns: Columns of a state for a program.
    """
    key_heads, key_dim = keys.shape[2:]
    block_key = max(16, triton.next_power_of_2(key_dim))
    load = CHUNK * keys.element_size() * (tiles * block_key + narrow * columns)
    return {
        **{"heads": values.shape[2], "key_heads": key_heads, "key_dim": key_dim, "value_dim": values.shape[3]},
        **{"chunk": CHUNK, "block_key": block_key, "block_columns": columns},
        **{"num_warps": 4 if key_dim <= WIDE else 8, "num_stages": max(1, min(stages, room_for_loads(keys) // load))},
    }


def gradient_sizes(keys: Tensor, sizes: dict[str, int], warps: int) -> dict[str, int]:
    """Return the constants of a kernel with `warps`, whose sums take more registers: wide keys have narrower blocks."""
    if sizes["key_dim"] <= WIDE:
        return sizes | {"num_warps": warps}
    has_room = room_for_loads(keys) >= ROOM
    return sizes | ({"num_warps": 16, "block_columns": 32} if has_room else {"num_warps": 4, "block_columns": 16})


def floats(like: Tensor, *shape: int) -> Tensor:
    """Return memory for fp32 on the device of a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


@triton.jit
def chunk_tiles(
    row, end, head, rows, channels, columns, is_channel, of_value,
    heads: tl.constexpr, key_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
):  # fmt: skip
    """Return where a chunk's rows of keys and of values lie, which of their numbers there are, and which rows.

    Called for each chunk: with parts from before the loop, outputs of the gated delta rule took 1.4 ms in place of 1.2.
    """
    inside = rows < end - row
    at_key = (row * key_heads + head // (heads // key_heads)) * key_dim
    at_key += rows[:, None] * (key_heads * key_dim) + channels[None, :]
    at_value = (row * heads + head) * value_dim + rows[:, None] * (heads * value_dim) + columns[None, :]
    return at_key, at_value, inside[:, None] & is_channel[None, :], inside[:, None] & of_value[None, :], inside


@triton.jit
def divided(tile, epsilon):
    """Return the reciprocals of the norms of rows, and the rows divided by their norms."""
    wide = tile.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide, 1) + epsilon)
    return norm, (wide * norm[:, None]).to(tile.dtype)


@triton.jit
def unit_inverse(products, rows):
    """Return the inverse of I + M, where M, `[64, 64]`, is not zero below its diagonal only."""
    # [[B, 0], [C, D]]^-1 = [[B^-1, 0], [-D^-1 C B^-1, D^-1]], for blocks of 1, 2, ... 32 rows
    one = rows[:, None] == rows[None, :]
    found = tl.where(one, 1.0, 0.0) - tl.where(rows[:, None] // 2 == rows[None, :] // 2, products, 0.0)
    for level in tl.static_range(1, 6):
        block_rows, block_columns = rows[:, None] >> level, rows[None, :] >> level
        is_beside = (block_rows != block_columns) & (block_rows >> 1 == block_columns >> 1)
        found -= tl.dot(tl.dot(found, tl.where(is_beside, products, 0.0)), found)
    return found
