"""AdamW's state in a checkpoint: `optimizer.safetensors`, whole tensors by parameter name, for any number of ranks.

Moments are in the type of the run's state: fp32, bf16, or codes (uint8). Codes have scales, fp32 for each piece of a
block of 256 elements that one rank has, in the order of the shards, and `NAME.blocks`, int64: the dimension and the
number of parts of tensor parallelism, then the indices in a part at which ranks cut it. A rank that reads the same
block takes its codes and its scale as they are. Blocks that its own cut divides otherwise, and moments of another type,
are converted through fp32, rounded to nearest. Masters are always fp32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bmburst.checkpoint.sharded_files import ShardedTensor, TensorGroup, index_name, part_names, parts_of
from bmburst.checkpoint.tensor_files import TensorFile, open_tensors
from bmburst.errors import UserError
from bmburst.optim.states import DTYPES, MASTER, MEAN, SCALES
from bmburst.zero import NamedShard, named_shards
from bmburst_ops.moments import BLOCK, blocks_of, table

if TYPE_CHECKING:
    from bmburst.blocks.model import Llama
    from bmburst.optim.adamw import AdamW

OPTIMIZER = "optimizer"
_BLOCKS = "blocks"
_AT_ONCE = 1 << 22  # elements whose indices are in memory at once


def optimizer_group(model: "Llama", optimizer: "AdamW", part_bytes: int | None) -> TensorGroup:
    """Return the tensors of the state of trained parameters."""
    tensors = [each for shard in _trained(model) for each in _tensors_of(shard, optimizer)]
    return TensorGroup(OPTIMIZER, tuple(tensors), part_bytes=part_bytes)


def load_optimizer(folder: Path, model: "Llama", optimizer: "AdamW", step: int) -> None:
    """Restore the state of trained parameters, of any type and ranks; UserError for one of another model or dtype."""
    from bmburst.optim.adamw import state_names

    files, shards = _open(folder), _trained(model)
    expected = {f"{shard.name}.{name}": shard.shape for shard in shards for name in state_names(shard)}
    of_codes = {f"{shard.name}.{name}" for shard in shards for name in (*SCALES.values(), _BLOCKS)}
    found = {key: file.shapes[key] for key, file in files.items() if key not in of_codes}
    different = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
    if different:
        both = (shapes.get(different[0]) for shapes in (found, expected))
        there, here = ("missing" if shape is None else list(shape) for shape in both)
        raise UserError(
            f"{folder / OPTIMIZER} is of another model or dtype: {different[0]} is {there}, here {here}\n"
            "fix: resume with the dtype the run had, or take the weights alone: --init-from"
        )
    for shard in shards:
        if not shard.is_here:
            continue
        blocks = _SavedBlocks.read(files, shard)
        for name in state_names(shard):
            key = f"{shard.name}.{name}"
            codes = shard.read(partial(files[key].read, key))
            if name == MASTER or blocks is None:
                optimizer.load_state_of(shard, name, codes.float(), step)
                continue
            key = f"{shard.name}.{SCALES[name]}"
            scales = files[key].read(key, 0, blocks.count)
            numbers = table(codes.device, signed=name == MEAN)
            optimizer.load_state_of(shard, name, blocks.decoded(shard, codes, scales, numbers), step)
            if optimizer.kind == "8bit":
                blocks.keep_whole(shard, (codes, scales), optimizer.stored_of(shard, name))


def _open(folder: Path) -> dict[str, TensorFile]:
    """Return the file of each tensor of a state, which is in one file or in parts."""
    index = folder / index_name(OPTIMIZER)
    parts = sorted(parts_of(index)) if index.exists() else part_names(OPTIMIZER, 1)
    opened = [open_tensors(folder / part, with_codes=True) for part in parts]
    return {name: file for file in opened for name in file.shapes}


def _trained(model: "Llama") -> list[NamedShard]:
    return [shard for shard in named_shards(model) if shard.storage.requires_grad]


def _tensors_of(shard: NamedShard, optimizer: "AdamW") -> Iterator[ShardedTensor]:
    from bmburst.optim.adamw import state_names

    dtype = DTYPES[optimizer.kind]
    for name in state_names(shard):
        if name == MASTER:
            yield ShardedTensor(f"{shard.name}.{name}", shard, torch.float32, partial(optimizer.state_of, shard, name))
        else:
            yield ShardedTensor(f"{shard.name}.{name}", shard, dtype, partial(_stored, optimizer, shard, name, 0))
    if optimizer.kind != "8bit":
        return
    of_scales = _of_scales(shard)
    for name, own in SCALES.items():
        yield ShardedTensor(
            f"{shard.name}.{own}", of_scales, torch.float32, partial(_stored, optimizer, shard, name, 1)
        )
    layout = torch.tensor([shard.split, shard.parts, *_cuts(shard)])
    firsts = {group.start for group in shard.groups}
    ranges = tuple((0, len(layout) if rank in firsts else 0) for rank in range(len(shard.ranges)))
    alone = replace(_flat(shard, len(layout)), ranges=ranges)
    yield ShardedTensor(f"{shard.name}.{_BLOCKS}", alone, torch.int64, partial(_of_first, alone, layout))


def _stored(optimizer: "AdamW", shard: NamedShard, name: str, which: int) -> Tensor:
    """Return this rank's moment, or its scales if `which` is 1."""
    found = optimizer.stored_of(shard, name)[which]
    assert found is not None
    return found


def _of_first(alone: NamedShard, layout: Tensor) -> Tensor:
    return layout[: alone.count].to(alone.device)


def _flat(shard: NamedShard, count: int) -> NamedShard:
    return replace(shard, shape=(count,), offset=0, split=0, parts=1)


def _of_scales(shard: NamedShard) -> NamedShard:
    """Return the shard of a parameter's scales."""
    size, end = prod(shard.shape) // shard.parts, 0
    found = {}
    for begin, stop in sorted({each for each in shard.ranges if each[0] < each[1]}):
        here = blocks_of(begin % size, stop - begin)
        found[begin, stop] = end, end + here
        end += here
    return replace(_flat(shard, end), ranges=tuple(found.get(each, (0, 0)) for each in shard.ranges))


def _cuts(shard: NamedShard) -> list[int]:
    """Return the indices in a part of a tensor at which ranks cut it."""
    size = prod(shard.shape) // shard.parts
    return sorted({begin for begin, end in shard.ranges if 0 < begin < end <= size})


@dataclass(frozen=True, slots=True)
class _SavedBlocks:
    """The pieces of blocks of a saved parameter.

    Attributes:
        split: Dimension along which tensor ranks had split it.
        parts: Number of these ranks.
        ends: Index in a part after each piece, int64, ascending.
    """

    split: int
    parts: int
    ends: Tensor

    @classmethod
    def read(cls, files: Mapping[str, TensorFile], shard: NamedShard) -> "_SavedBlocks | None":
        """Return those of a parameter; None if its state is not of codes."""
        name = f"{shard.name}.{_BLOCKS}"
        if (file := files.get(name)) is None:
            return None
        split, parts, *cuts = file.read(name, 0, prod(file.shapes[name])).tolist()
        return cls(split, parts, _ends(0, prod(shard.shape) // parts, cuts))

    @property
    def count(self) -> int:
        """Number of scales."""
        return self.parts * len(self.ends)

    def decoded(self, shard: NamedShard, codes: Tensor, scales: Tensor, numbers: Tensor) -> Tensor:
        """Return this rank's elements of a moment, fp32.

        Args:
            shard: The parameter.
            codes: This rank's codes.
            scales: All scales.
            numbers: The table of the codes.
        """
        found, size = torch.empty(len(codes)), prod(shard.shape) // self.parts
        for at in range(0, len(codes), _AT_ONCE):
            run = slice(at, min(at + _AT_ONCE, len(codes)))
            index = torch.arange(shard.begin + run.start, shard.begin + run.stop)
            if not self._is_ordered_as(shard):
                index = _reordered(
                    index, shard.shape, shard.parts if shard.split else 1, self.parts if self.split else 1
                )
            piece = torch.searchsorted(self.ends, index % size, right=True) + index // size * len(self.ends)
            found[run] = numbers[codes[run].int()] * scales[piece]
        return found

    def keep_whole(self, shard: NamedShard, saved: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor | None]) -> None:
        """Take codes and scales of the pieces that are the same here as they are.

        Args:
            shard: The parameter.
            saved: This rank's codes, and all scales.
            own: This rank's codes and scales, to be written.
        """
        size = prod(shard.shape) // self.parts
        if not shard.count or not self._is_ordered_as(shard) or size != prod(shard.shape) // shard.parts:
            return
        (codes, scales), (into, of_into) = saved, own
        number, first = divmod(shard.begin, size)
        ends = _ends(first, first + shard.count, [])
        begins = torch.cat((torch.tensor([first]), ends[:-1]))
        place = torch.searchsorted(self.ends, ends)
        same = (self.ends[place] == ends) & (torch.cat((torch.tensor([0]), self.ends))[place] == begins)
        assert of_into is not None
        there = scales[number * len(self.ends) + place]
        of_into.copy_(torch.where(same, there, of_into.cpu()))
        of_each = same.repeat_interleave(ends - begins)
        into.copy_(torch.where(of_each, codes, into.cpu()))

    def _is_ordered_as(self, shard: NamedShard) -> bool:
        """Whether elements are in the same order in the shards."""
        return (self.parts if self.split else 1) == (shard.parts if shard.split else 1)


def _ends(begin: int, end: int, cuts: Sequence[int]) -> Tensor:
    """Return where the pieces of a run [begin, end) end: at multiples of `BLOCK`, at cuts, and at its end."""
    inner = torch.arange(min((begin // BLOCK + 1) * BLOCK, end), end, BLOCK)
    ends: Tensor = torch.cat((inner, torch.tensor([*cuts, end], dtype=torch.int64))).unique()
    return ends


def _reordered(index: Tensor, shape: Sequence[int], here: int, there: int) -> Tensor:
    """Return the indices in shard order of matrices whose columns are split in `there` parts, for `here` parts."""
    rows, columns = shape
    width = columns // here
    row, column = index % (rows * width) // width, index // (rows * width) * width + index % width
    width = columns // there
    return column // width * rows * width + row * width + column % width
