"""What AdamW keeps of a weight in each type of state (`OptimizerConfig.state`), and where it lies in a ZeRO shard.

A rank's storage holds runs of several parameters. `Part` is such a run. Blocks of 8-bit moments and random numbers
depend on indices in the parameter alone, so the cut of the storage into ranks changes only blocks that it divides: each
rank then has a scale for its own piece of the block.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from bmburst.comm.host_memory import host_zeros
from bmburst.zero import NamedShard
from bmburst_ops.moments import BLOCK, Rounding, aligned, blocks_of, decoded, encode_, key_of, part_of

MASTER, MEAN, SQUARE, STEP = "_param_fp32", "exp_avg", "exp_avg_sq", "step"
REMAINDER = "_param_remainder"
SCALES = {MEAN: "exp_avg_scale", SQUARE: "exp_avg_sq_scale"}
"""Names of the scales of 8-bit moments."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
"""Dtype of the moments in each type of state."""
_AT_ONCE = 1 << 24  # weights that are copied to host memory at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A run of a storage whose elements are neighbours in a parameter.

    Attributes:
        offset: Where it begins in the storage.
        count: Number of elements.
        first: Index of its first element in the parameter, or in this tensor rank's part of it.
        stem: 32 bits of the parameter and the seed; see `bmburst_ops.moments.key_of`.
        block: Number of its first block in the storage's scales.
    """

    offset: int
    count: int
    first: int
    stem: int
    block: int

    @property
    def at(self) -> slice:
        """The run."""
        return slice(self.offset, self.offset + self.count)

    @property
    def blocks(self) -> slice:
        """Its blocks."""
        return slice(self.block, self.block + blocks_of(self.first, self.count))


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of a part that is updated at once.

    Attributes:
        at: The piece, in the storage.
        part: The part.
    """

    at: slice
    part: Part

    def rounding(self, state: Mapping[str, Any], step: int) -> Rounding | None:
        """Return how the moments of a state are rounded in a step, counted from 1; None for fp32."""
        if state[MEAN].dtype == torch.float32:
            return None
        part, scales = self.part, None
        if has_scales(state):
            scales = state[SCALES[MEAN]][part.blocks], state[SCALES[SQUARE]][part.blocks]
        whole = Rounding(first=part.first, key=key_of(part.stem, step), scales=scales)
        return part_of(whole, slice(self.at.start - part.offset, self.at.stop - part.offset))


def has_scales(state: Mapping[str, Any]) -> bool:
    """Whether the moments are 8-bit codes."""
    return SCALES[MEAN] in state


def runs_of(parts: Iterable[Part], piece: int, state: Mapping[str, Any]) -> list[Run]:
    """Return the pieces of parts, of `piece` elements each; for 8-bit moments, of whole blocks."""
    piece = -(-piece // BLOCK) * BLOCK if has_scales(state) else piece
    return [
        Run(slice(part.offset + run.start, part.offset + run.stop), part)
        for part in parts
        for run in aligned(part.count, part.first, piece)
    ]


def part_of_all(count: int, name: str) -> tuple[Part, ...]:
    """Return the part of a storage that is one parameter."""
    return (Part(offset=0, count=count, first=0, stem=zlib.crc32(name.encode()), block=0),)


def parts_of(shards: Sequence[NamedShard], seed: int) -> dict[Tensor, tuple[Part, ...]]:
    """Return the parts of every storage."""
    found: dict[Tensor, list[Part]] = {}
    for shard in shards:
        parts = found.setdefault(shard.storage, [])
        if shard.count:
            number, first = divmod(shard.begin, prod(shard.shape) // shard.parts)
            stem = zlib.crc32(f"{seed} {number} {shard.name}".encode())
            block = parts[-1].blocks.stop if parts else 0
            parts.append(Part(offset=shard.offset, count=shard.count, first=first, stem=stem, block=block))
    return {storage: tuple(parts) for storage, parts in found.items()}


def initial_state(
    weights: Tensor, device: torch.device, kind: str, parts: Sequence[Part], *, with_weights: bool = False
) -> dict[str, Any]:
    """Return the state before the first step.

    Args:
        weights: The storage's weights.
        device: Where the state lies.
        kind: The type of state.
        parts: The storage's parts.
        with_weights: Whether the state lies beside the weights, in host memory.
    """

    def zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        on_host = with_weights or device != weights.device
        return host_zeros(shape, dtype) if on_host else torch.zeros(shape, dtype=dtype, device=device)

    state: dict[str, Any] = {STEP: 0}
    blocks = torch.Size([parts[-1].blocks.stop if parts else 0])
    for name in (MEAN, SQUARE):
        state[name] = zeros(weights.shape, DTYPES[kind])
        if kind == "8bit":
            state[SCALES[name]] = zeros(blocks, torch.float32)
    if weights.dtype == torch.bfloat16 and (with_weights or kind != "float32"):  # the rest of the fp32 master
        state[REMAINDER] = zeros(weights.shape, torch.int16)
    elif weights.dtype != torch.float32:
        state[MASTER] = zeros(weights.shape, torch.float32)
        _copy_wide(weights, state[MASTER])
    return state


def _copy_wide(weights: Tensor, master: Tensor) -> None:
    """Copy weights to a master on any device. They are cast there, to save GPU memory, in pieces, to save the host's.

    The host would page in new memory for each storage, which takes longer than the copy.
    """
    if weights.device == master.device:
        master.copy_(weights)
        return
    size = min(weights.numel(), _AT_ONCE)
    staged = torch.empty(size, dtype=weights.dtype, device=master.device, pin_memory=weights.is_cuda)
    for narrow, wide in zip(*(each.view(-1).split(_AT_ONCE) for each in (weights, master)), strict=True):
        wide.copy_(staged[: len(narrow)].copy_(narrow))


def moment(state: Mapping[str, Any], name: str, part: Part) -> Tensor:
    """Return a moment of a part, fp32 `[n]`."""
    scales = state[SCALES[name]][part.blocks] if has_scales(state) else None
    return decoded(state[name].view(-1)[part.at], scales, part.first, signed=name == MEAN)


def set_moment(state: Mapping[str, Any], name: str, part: Part, values: Tensor) -> None:
    """Set a moment of a part, rounded to nearest, from fp32 `[n]`."""
    stored = state[name].view(-1)[part.at]
    scales = state[SCALES[name]][part.blocks] if has_scales(state) else None
    encode_(stored, scales, values.to(stored.device), part.first, None, signed=name == MEAN)
