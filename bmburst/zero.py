"""Finds, gathers and scatters the ZeRO shards of parameters: BMTrain shards every tensor over a group of ranks.

BMTrain flattens the parameters of a `Block` into one storage for each dtype and group and shards it evenly over the
ranks of a ZeRO group: all ranks, or neighbouring ones (`bmburst.zero_group`). So a rank's shard of one tensor is a
contiguous run of its elements, possibly empty. A `DistributedParameter` outside a Block is sharded alone. Optimizer
states (`exp_avg` and so on) have the shape of the shard, so the same map serves weights, gradients and optimizer states
on any number of ranks. Every ZeRO group has all tensors.

In a pipeline a parameter is sharded over the ranks of its stage, and the other ranks hold nothing of it. They know its
name, shape and runs (`describe`), because all ranks read and write checkpoints together. A table that two stages have
is on two groups.

Under tensor parallelism each rank of a tensor group has a part of a matrix, and ZeRO shards that part over the ranks
with the same part. Names and shapes are still those of whole tensors, so checkpoints do not depend on the number of
ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from math import prod
from typing import Any

import bmtrain as bmt
import torch
from torch import Tensor

from bmburst.comm.collectives import FlatStorage, launched_together
from bmburst.comm.host_memory import host_shard
from bmburst.errors import UserError


class ShardData(Enum):
    """Marker for arguments that take either the shard's weights or a tensor of the same layout."""

    WEIGHTS = auto()


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterFacts:
    """What all ranks know of a parameter, also those of other stages."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    group: str | None
    """BMTrain's name of the parameter group, for example "no_decay"."""
    split: int = 0
    """Dimension along which tensor parallelism splits the tensor."""
    parts: int = 1
    """Number of tensor ranks that split it."""

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of this class alone, by name."""
        return {each.name: getattr(self, each.name) for each in fields(ParameterFacts)}


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedShard(ParameterFacts):
    """One parameter of a model and this rank's shard of it.

    Elements are counted in shard order: the parts of the tensor ranks one after the other, each flattened. This is the
    order of the flattened tensor itself, unless tensor parallelism splits it along a dimension other than 0.
    """

    parameter: torch.nn.Parameter
    """As `model.parameters()` yields it: `.data` and `.grad` are this rank's piece, flat, possibly empty.

    On the ranks of other stages a stand-in without elements."""
    storage: torch.nn.Parameter
    """The tensor that ZeRO moves: the Block's flat parameter with the piece, or `parameter` itself outside a Block."""
    offset: int
    """Where the piece starts in `storage`."""
    ranges: tuple[tuple[int, int], ...]
    """The run [begin, end) of every rank of the world, in shard order; may be empty."""
    groups: tuple[range, ...]
    """Ranks that hold the tensor once, together; the pieces of a group after the first are copies."""
    rank: int
    comm: Any = field(repr=False)
    """BMTrain's communicator of the world."""

    @property
    def device(self) -> torch.device:
        """The device on which BMTrain gathers the tensor: the GPU, even if the storage is in host memory."""
        kept = host_shard(self.storage)
        return self.storage.device if kept is None else kept.device

    @property
    def begin(self) -> int:
        """Index of this rank's first element, in shard order."""
        return self.ranges[self.rank][0]

    @property
    def end(self) -> int:
        """Index after this rank's last element, in shard order."""
        return self.ranges[self.rank][1]

    @property
    def count(self) -> int:
        """Number of this rank's elements."""
        return self.end - self.begin

    @property
    def is_here(self) -> bool:
        """Whether this rank's stage of a pipeline has the parameter."""
        return any(self.rank in group for group in self.groups)

    @property
    def is_copy(self) -> bool:
        """Whether a rank of the first group has the same piece: sums over ranks and files leave this one out."""
        return self.rank not in self.groups[0]

    def once(self, rank: int) -> tuple[int, int]:
        """Return the run of a rank if it is not a copy, else an empty run: every element belongs to one rank."""
        return self.ranges[rank] if rank in self.groups[0] else (0, 0)

    def sources(self, rank: int) -> range:
        """Return the ranks from which a rank gathers the tensor: its own group if it is in one, else the first."""
        return next((group for group in self.groups if rank in group), self.groups[0])

    def local(self, like: Tensor | ShardData = ShardData.WEIGHTS) -> Tensor:
        """Return this rank's piece of a tensor with the layout of the parameter, as a flat view.

        Args:
            like: A tensor with the layout of `parameter` or of `storage`: a gradient or an optimizer state of either.

        Raises:
            ValueError: The tensor has neither layout.
        """
        if isinstance(like, ShardData):
            kept = host_shard(self.storage)
            if kept is not None:
                kept.settle()
            # In a forward pass the data of a shard in host memory are its copy on the GPU.
            like = self.storage.data if kept is None else kept.weights
        if like.dim() == 1 and like.numel() == self.storage.numel():
            return like[self.offset : self.offset + self.count]
        if like.numel() == self.count:
            return like.reshape(-1)
        raise ValueError(
            f"{self.name}: {tuple(like.shape)} is neither this rank's {self.count} elements nor its storage of "
            f"{self.storage.numel()}"
        )

    def ordered(self, full: Tensor) -> Tensor:
        """Return a full tensor's elements in shard order, flat; a copy only if the order differs."""
        if self.parts == 1 or self.split == 0:
            return full.reshape(-1)
        numbers: Tensor = full.unflatten(self.split, (self.parts, -1)).movedim(self.split, 0).reshape(-1)
        return numbers

    def whole(self, ordered: Tensor) -> Tensor:
        """Return the full tensor from its elements in shard order: the inverse of `ordered`."""
        if self.parts == 1 or self.split == 0:
            return ordered.view(self.shape)
        part = [size // self.parts if dim == self.split else size for dim, size in enumerate(self.shape)]
        full: Tensor = ordered.view(self.parts, *part).movedim(0, self.split).reshape(self.shape)
        return full

    def read(self, run: Callable[[int, int], Tensor]) -> Tensor:
        """Read this rank's elements from a store of whole tensors; only the rows that contain them are read.

        Args:
            run: Returns the elements [begin, end) of the flattened full tensor, flat.
        """
        if self.parts == 1 or self.split == 0 or not self.count:
            return run(self.begin, self.end)
        assert self.split == 1 and len(self.shape) == 2
        rows, columns = self.shape
        width = columns // self.parts
        part, begin = divmod(self.begin, rows * width)  # all elements of a rank are in one part
        first, last = begin // width, -(-(begin + self.count) // width)
        read = run(first * columns, last * columns).view(-1, columns)[:, part * width : (part + 1) * width]
        return read.reshape(-1)[begin - first * width :][: self.count]


@dataclass(frozen=True, kw_only=True)
class ShardDescription(ParameterFacts):
    """Where the stages of a pipeline have a parameter; see `NamedShard`.

    Attributes:
        is_trained: Whether it requires a gradient.
        runs: The run of each rank of a stage that has it.
        stages: Numbers of the stages that have it.
    """

    is_trained: bool
    runs: tuple[tuple[int, int], ...]
    stages: tuple[int, ...]

    @property
    def groups(self) -> tuple[range, ...]:
        """Ranks of each stage that has it."""
        size = len(self.runs)
        return tuple(range(stage * size, (stage + 1) * size) for stage in self.stages)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The run of every rank of the world; empty in other stages."""
        stages = range(bmt.world_size() // len(self.runs))
        empty = ((0, 0),) * len(self.runs)
        return tuple(run for stage in stages for run in (self.runs if stage in self.stages else empty))

    def shard(self, own: NamedShard | None) -> NamedShard:
        """Return this rank's shard.

        Args:
            own: The shard as this rank's stage alone knows it; None: the stage does not have the parameter.
        """
        if own is not None:
            return replace(own, ranges=self.ranges, groups=self.groups)
        nothing = torch.nn.Parameter(torch.empty(0, dtype=self.dtype, device="cuda"), requires_grad=self.is_trained)
        return NamedShard(
            **self.facts,
            parameter=nothing,
            storage=nothing,
            offset=0,
            ranges=self.ranges,
            groups=self.groups,
            rank=bmt.rank(),
            comm=bmt.config["comm"],
        )


def describe(model: torch.nn.Module) -> tuple[ShardDescription, ...]:
    """Return the parameters of all stages of a model, in its order, the same on all ranks. Collective."""
    size = bmt.config["zero_size"]  # of a stage
    mine = [
        ShardDescription(
            **each.facts,
            is_trained=each.storage.requires_grad,
            runs=each.ranges[:size],
            stages=(bmt.rank() // size,),
        )
        for each in _own_shards(model)
    ]
    found: dict[str, ShardDescription] = {}
    for stage in bmt.store.allgather_objects(mine)[::size]:
        for each in stage:
            before = found.get(each.name)
            found[each.name] = each if before is None else replace(before, stages=before.stages + each.stages)
    return tuple(found.values())


def named_shards(model: torch.nn.Module) -> list[NamedShard]:
    """Return every distributed parameter of a model once, in the model's order, the same on all ranks.

    A model in stages has the result of `describe` as its attribute `described`.
    """
    own = _own_shards(model)
    described: tuple[ShardDescription, ...] | None = getattr(model, "described", None)
    if described is None:
        return own
    by_name = {each.name: each for each in own}
    return [each.shard(by_name.get(each.name)) for each in described]


def _own_shards(model: torch.nn.Module) -> list[NamedShard]:
    """Return the shards of the parameters that this rank has."""
    if any(block._mode == "PIPE" for block in _blocks(model)):
        raise UserError(
            "BMTrain's PipelineTransformerBlockList keeps stale copies of the layers of other stages, which bmburst's "
            "optimizers and checkpoints do not know\n"
            "allowed: BMTrain's own: bmt.optim, bmt.save, bmt.load\n"
            "fix: use these, or bmburst train --pipeline-parallel for a LLaMA"
        )
    inside = {id(info["parameter"]): (block, info) for block in _blocks(model) for info in block._param_info}
    shards = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, bmt.DistributedParameter):
            raise TypeError(f"{name} is not a bmtrain.DistributedParameter: BMTrain would not keep ranks' copies equal")
        if parameter._tp_mode and parameter._tp_split_dim < 0:
            raise TypeError(f"{name} is in tensor-parallel mode but not split: each tensor rank would have its own")
        size = prod(parameter._original_shape)
        parts = bmt.config["tp_size"] if parameter._tp_mode else 1
        if id(parameter) in inside:
            block, info = inside[id(parameter)]
            storage, stored = block._storage_params[info["kw_name"]], block._storage_info[info["kw_name"]]
            comm, partition, start = stored["zero_comm"], stored["partition_size"], info["offset"]
        else:
            storage, comm, start = parameter, parameter._zero_comm, 0
            partition = -(-size // bmt.nccl.commCount(comm))
        zero_size, zero_rank = bmt.nccl.commCount(comm), bmt.nccl.commRank(comm)
        pieces = [
            (min(max(r * partition - start, 0), size), min(max((r + 1) * partition - start, 0), size))
            for r in range(zero_size)
        ]
        begin, end = pieces[zero_rank]
        # In BMTrain's topology, the ranks of a tensor group are neighbours, and so are those of a ZeRO group.
        of_group = tuple((p * size + b, p * size + e) for b, e in pieces for p in range(parts))
        firsts = range(0, bmt.world_size(), len(of_group))
        shards.append(
            NamedShard(
                name=name,
                shape=tuple(parameter._tp_original_shape),
                dtype=storage.dtype,
                group=parameter.group,
                parameter=parameter,
                storage=storage,
                offset=max(start - zero_rank * partition, 0) if begin < end else 0,
                ranges=of_group * len(firsts),
                groups=tuple(range(first, first + len(of_group)) for first in firsts),
                rank=bmt.rank(),
                comm=bmt.config["comm"],
                split=max(parameter._tp_split_dim, 0),
                parts=parts,
            )
        )
    return shards


def gradient_of(shard: NamedShard) -> Tensor | None:
    """Return the gradient of a parameter's storage, or None. For host memory, wait until it is complete."""
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
    """Gather a tensor from the shards of a ZeRO group. Collective: every rank calls it for the same parameter.

    Args:
        shard: The parameter's shard.
        like: A tensor with the layout of the parameter (see `NamedShard.local`), on any device; default: the weights.
            May be None on a rank without a piece, which has no gradient and no optimizer state.
        dtype: Dtype of the tensor, the same on all ranks, since a rank without a piece cannot know it. Default: the
            dtype of the weights.
        root: The only rank to receive the result; None: all ranks.

    Returns:
        The full tensor in the parameter's shape, on the GPU; None on ranks other than `root`.

    Raises:
        ValueError: `like` has another dtype or layout, or is None on a rank with a piece.
    """
    dtype, empty = dtype or shard.dtype, shard.count == 0
    if empty:
        piece = torch.empty(0, dtype=dtype, device=shard.device)
    elif like is None:
        raise ValueError(f"{shard.name}: this rank has {shard.count} elements, but there is no tensor to gather from")
    else:
        piece = shard.local(like).detach().to(shard.device)
    if piece.dtype != dtype:
        raise ValueError(f"{shard.name}: gathering {dtype} on all ranks, but this one holds {piece.dtype}")
    receivers = range(len(shard.ranges)) if root is None else (root,)
    full = torch.empty(prod(shard.shape), dtype=dtype, device=piece.device) if shard.rank in receivers else None
    # BMTrain reduces and gathers on its own stream, which must finish before the piece is read.
    torch.cuda.current_stream().wait_stream(bmt.config["load_stream"])
    flat = FlatStorage(piece.contiguous())
    with launched_together():
        for peer in receivers:
            if not empty and peer != shard.rank and shard.rank in shard.sources(peer):
                bmt.nccl.send(flat, peer, shard.comm)
        for peer in shard.sources(shard.rank):
            begin, end = shard.ranges[peer]
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
        shard: The parameter's shard.
        full: The tensor in the parameter's shape; only this rank's elements are read, and converted to the dtype.
        into: A tensor with the layout of the parameter (see `NamedShard.local`); default: the weights.

    Raises:
        ValueError: The shape differs.
    """
    if tuple(full.shape) != shard.shape:
        raise ValueError(f"{shard.name} has shape {shard.shape}, got {tuple(full.shape)}")
    if shard.count:
        scatter_piece(shard, shard.ordered(full)[shard.begin : shard.end], into)


@torch.no_grad()
def scatter_piece(shard: NamedShard, piece: Tensor, into: Tensor | ShardData = ShardData.WEIGHTS) -> None:
    """Write this rank's piece from a tensor of its own elements only: `scatter` without the full tensor."""
    if shard.count:
        own = shard.local(into)
        # A copy between devices would convert on the host, in new memory that is not pinned.
        own.copy_(piece if piece.device == own.device else piece.to(own.dtype))
        if into is ShardData.WEIGHTS and (kept := host_shard(shard.storage)):
            kept.version += 1
        # BMTrain gathers on its own stream, which must not start before the weights are written.
        bmt.config["load_stream"].wait_stream(torch.cuda.current_stream())


def _blocks(model: torch.nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, bmt.Block))
