"""Finds, gathers and scatters the shards of parameters: BMTrain's ZeRO shards every tensor over all ranks.

BMTrain flattens the parameters of a `Block` into one storage for each dtype and group and shards it evenly over the
ranks, so a rank's shard of one tensor is any run of its elements, or none. A `DistributedParameter` outside a Block is
sharded alone. Optimizer states (`exp_avg` and so on) have the shape of the shard, so the same map serves weights,
gradients and optimizer states on any number of ranks.

Under tensor parallelism a rank of each tensor group has a part of a matrix, and ZeRO shards that part over the ranks
that have the same one. Names and shapes are still those of whole tensors: what is gathered, saved and loaded does not
depend on the number of ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.comm.bmtrain_nccl import FlatStorage, launched_together
from bmburst.comm.host_memory import host_shard


class ShardData(Enum):
    """Selects the data of a shard: its weights, where a tensor of the same layout may be given instead."""

    WEIGHTS = auto()


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedShard:
    """One parameter of a model and this rank's shard of it.

    Elements are counted in shard order: the parts of the tensor ranks one after the other, each flattened. This is the
    order of the flattened tensor itself unless tensor ranks split it along another dimension than 0.
    """

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    group: str | None
    """BMTrain's name of the parameter group, for example "no_decay"."""
    parameter: torch.nn.Parameter
    """As `model.parameters()` yields it: `.data` and `.grad` are this rank's piece, flat; empty where it has none."""
    storage: torch.nn.Parameter
    """What ZeRO moves: the Block's flat parameter that contains the piece, or `parameter` itself outside a Block."""
    offset: int
    """Where the piece starts in `storage`."""
    ranges: tuple[tuple[int, int], ...]
    """For every rank of the world the run [begin, end), in shard order, that it holds; may be empty."""
    rank: int
    comm: Any = field(repr=False)
    """Of all ranks that hold pieces: the world."""
    split: int = 0
    """Dimension along which tensor ranks share the tensor."""
    parts: int = 1
    """Tensor ranks that share it."""

    @property
    def device(self) -> torch.device:
        """Where BMTrain gathers it: the GPU, also if the storage is in host memory."""
        kept = host_shard(self.storage)
        return self.storage.device if kept is None else kept.device

    @property
    def begin(self) -> int:
        """First of this rank's numbers, in shard order."""
        return self.ranges[self.rank][0]

    @property
    def end(self) -> int:
        """One past the last of this rank's numbers, in shard order."""
        return self.ranges[self.rank][1]

    @property
    def count(self) -> int:
        """How many numbers this rank has."""
        return self.end - self.begin

    def local(self, like: Tensor | ShardData = ShardData.WEIGHTS) -> Tensor:
        """Return this rank's piece of a tensor that is laid out as the parameter is, as a flat view.

        Args:
            like: Laid out as `parameter` or as `storage` (an optimizer's state for either, a gradient).

        Raises:
            ValueError: It is laid out as neither.
        """
        if isinstance(like, ShardData):
            if kept := host_shard(self.storage):
                kept.settle()
            like = self.storage.data
        if like.dim() == 1 and like.numel() == self.storage.numel():
            return like[self.offset : self.offset + self.count]
        if like.numel() == self.count:
            return like.reshape(-1)
        raise ValueError(
            f"{self.name}: {tuple(like.shape)} is neither this rank's {self.count} numbers nor its storage of "
            f"{self.storage.numel()}"
        )

    def ordered(self, full: Tensor) -> Tensor:
        """Return a full tensor's numbers in shard order, flat; a copy only where that is another order."""
        if self.parts == 1 or self.split == 0:
            return full.reshape(-1)
        numbers: Tensor = full.unflatten(self.split, (self.parts, -1)).movedim(self.split, 0).reshape(-1)
        return numbers

    def whole(self, ordered: Tensor) -> Tensor:
        """Return the full tensor of numbers in shard order: the inverse of `ordered`."""
        if self.parts == 1 or self.split == 0:
            return ordered.view(self.shape)
        part = [size // self.parts if dim == self.split else size for dim, size in enumerate(self.shape)]
        full: Tensor = ordered.view(self.parts, *part).movedim(0, self.split).reshape(self.shape)
        return full

    def read(self, run: Callable[[int, int], Tensor]) -> Tensor:
        """Return this rank's numbers from where whole tensors are kept, reading no more than the rows that hold them.

        Args:
            run: Returns the numbers [begin, end) of the flattened full tensor, flat.
        """
        if self.parts == 1 or self.split == 0 or not self.count:
            return run(self.begin, self.end)
        assert self.split == 1 and len(self.shape) == 2
        rows, columns = self.shape
        width = columns // self.parts
        part, begin = divmod(self.begin, rows * width)  # a rank's numbers are all of one part
        first, last = begin // width, -(-(begin + self.count) // width)
        read = run(first * columns, last * columns).view(-1, columns)[:, part * width : (part + 1) * width]
        return read.reshape(-1)[begin - first * width :][: self.count]


def named_shards(model: torch.nn.Module) -> list[NamedShard]:
    """Return every distributed parameter of a model once, in the model's order, the same on all ranks."""
    inside = {id(info["parameter"]): (block, info) for block in _blocks(model) for info in block._param_info}
    shards = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, bmt.DistributedParameter):
            raise TypeError(f"{name} is no bmtrain.DistributedParameter: BMTrain would not keep it equal on all ranks")
        if parameter._tp_mode and parameter._tp_split_dim < 0:
            raise TypeError(f"{name} is in tensor-parallel mode but not split: each tensor rank would have its own")
        size = prod(parameter._original_shape)
        zero_size, zero_rank = bmt.nccl.commCount(parameter._zero_comm), bmt.nccl.commRank(parameter._zero_comm)
        parts = bmt.config["tp_size"] if parameter._tp_mode else 1
        if id(parameter) in inside:
            block, info = inside[id(parameter)]
            storage = block._storage_params[info["kw_name"]]
            partition, start = block._storage_info[info["kw_name"]]["partition_size"], info["offset"]
        else:
            storage, start = parameter, 0
            partition = -(-size // zero_size)
        pieces = [
            (min(max(r * partition - start, 0), size), min(max((r + 1) * partition - start, 0), size))
            for r in range(zero_size)
        ]
        begin, end = pieces[zero_rank]
        shards.append(
            NamedShard(
                name=name,
                shape=tuple(parameter._tp_original_shape),
                dtype=storage.dtype,
                group=parameter.group,
                parameter=parameter,
                storage=storage,
                offset=max(start - zero_rank * partition, 0) if begin < end else 0,
                # As BMTrain's topology has it, tensor ranks are neighbours.
                ranges=tuple((p * size + b, p * size + e) for b, e in pieces for p in range(parts)),
                rank=bmt.rank(),
                comm=bmt.config["comm"],
                split=max(parameter._tp_split_dim, 0),
                parts=parts,
            )
        )
    return shards


def gradient_of(shard: NamedShard) -> Tensor | None:
    """Return the gradient of a parameter's storage, if there is one; in host memory it is whole."""
    if kept := host_shard(shard.storage):
        kept.wait_for_gradient()
    return shard.storage.grad


def gather(
    shard: NamedShard,
    like: Tensor | ShardData | None = ShardData.WEIGHTS,
    *,
    dtype: torch.dtype | None = None,
    root: int | None = None,
) -> Tensor | None:
    """Gather a tensor from all ranks' shards. Every rank calls it for the same shard.

    Args:
        shard: Which parameter.
        like: Laid out as the parameter is (see `NamedShard.local`), on any device; by default the weights. May be None
            on a rank without a piece, which has no gradient and no state.
        dtype: Of the tensor, the same on all ranks; the weights' by default. A rank without a piece cannot know it.
        root: The only rank to receive the result; None for all.

    Returns:
        The full tensor in the parameter's shape, on the GPU; None on ranks other than `root`.

    Raises:
        ValueError: `like` is of another dtype or layout, or None on a rank with a piece.
    """
    dtype, empty = dtype or shard.dtype, shard.count == 0
    if empty:
        piece = torch.empty(0, dtype=dtype, device=shard.device)
    elif like is None:
        raise ValueError(f"{shard.name}: this rank has {shard.count} numbers, but there is no tensor to gather from")
    else:
        piece = shard.local(like).detach().to(shard.device)
    if piece.dtype != dtype:
        raise ValueError(f"{shard.name}: gathering {dtype} on all ranks, but this one holds {piece.dtype}")
    receivers = range(len(shard.ranges)) if root is None else (root,)
    full = torch.empty(prod(shard.shape), dtype=dtype, device=piece.device) if shard.rank in receivers else None
    # BMTrain reduces and gathers on its own stream; what we read must be finished.
    torch.cuda.current_stream().wait_stream(bmt.config["load_stream"])
    flat = FlatStorage(piece.contiguous())
    with launched_together():
        for peer in receivers:
            if not empty and peer != shard.rank:
                bmt.nccl.send(flat, peer, shard.comm)
        for peer, (begin, end) in enumerate(shard.ranges):
            if full is not None and begin < end and peer != shard.rank:
                bmt.nccl.recv(FlatStorage(full[begin:end]), peer, shard.comm)
    if full is None:
        return None
    if not empty:
        full[shard.begin : shard.end] = piece
    return shard.whole(full)


@torch.no_grad()
def scatter(shard: NamedShard, full: Tensor, into: Tensor | ShardData = ShardData.WEIGHTS) -> None:
    """Write this rank's piece of a full tensor, without communication; the inverse of `gather`.

    Args:
        shard: Which parameter.
        full: In the parameter's shape; only this rank's numbers are read, and converted.
        into: Laid out as the parameter is (see `NamedShard.local`); by default the weights.

    Raises:
        ValueError: The shape differs.
    """
    if tuple(full.shape) != shard.shape:
        raise ValueError(f"{shard.name} has shape {shard.shape}, got {tuple(full.shape)}")
    if shard.count:
        scatter_piece(shard, shard.ordered(full)[shard.begin : shard.end], into)


@torch.no_grad()
def scatter_piece(shard: NamedShard, piece: Tensor, into: Tensor | ShardData = ShardData.WEIGHTS) -> None:
    """Write this rank's piece, given as exactly its own numbers: `scatter` where the full tensor is nowhere held."""
    if shard.count:
        shard.local(into).copy_(piece)
        if into is ShardData.WEIGHTS and (kept := host_shard(shard.storage)):
            kept.version += 1
        # BMTrain gathers on its own stream, which must not start before the weights are written.
        bmt.config["load_stream"].wait_stream(torch.cuda.current_stream())


def _blocks(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, bmt.Block))
