"""The ranks as a grid: data x sequence. Only a Mesh knows groups.

Ranks of one sequence group are neighbours (`sequence_rank = rank % sequence`), so that the ring stays inside a node as
long as it can; ranks of one data group are `sequence` apart.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from bmburst.comm.checks import Checked
from bmburst.comm.groups import Split, bmtrain_groups, process_groups
from bmburst.errors import UserError


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks stand on each axis. Pure: no group, no device.

    Raises:
        UserError: An axis is smaller than 1.
    """

    data: int
    sequence: int

    def __post_init__(self) -> None:
        if self.data < 1 or self.sequence < 1:
            raise UserError(
                f"a mesh needs at least 1 rank on each axis, got data {self.data} x sequence {self.sequence}"
            )

    @classmethod
    def fit(cls, world_size: int, data: int | None = None, sequence: int | None = None) -> "MeshShape":
        """Return the mesh of `world_size` ranks; an axis not given takes what the other leaves (data 1 by default).

        Raises:
            UserError: The axes do not multiply to the ranks there are.
        """
        if data is None:
            data = world_size // sequence if sequence else 1
        if sequence is None:
            sequence = world_size // data if data else 0
        if data < 1 or sequence < 1 or data * sequence != world_size:
            divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
            raise UserError(
                f"{world_size} ranks cannot form a mesh of data {data} x sequence {sequence}\n"
                f"data x sequence must be {world_size}: each one of {', '.join(map(str, divisors))}"
            )
        return cls(data, sequence)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.data * self.sequence

    def sequence_groups(self) -> list[list[int]]:
        """Return the global ranks of each sequence group, in ring order."""
        return [[d * self.sequence + s for s in range(self.sequence)] for d in range(self.data)]

    def data_groups(self) -> list[list[int]]:
        """Return the global ranks of each data group."""
        return [[d * self.sequence + s for d in range(self.data)] for s in range(self.sequence)]


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place in the grid, with the communicators of its groups.

    Made by `Mesh.over_bmtrain` or `Mesh.over_process_group`. `with mesh.current():` makes its sequence group the one
    that `burst_attention`, `shard` and `unshard` use when no group is named.
    """

    shape: MeshShape
    rank: int
    world: Checked
    sequence: Checked
    data: Checked

    @property
    def sequence_rank(self) -> int:
        """This rank's place on its sequence ring."""
        return self.rank % self.shape.sequence

    @property
    def data_rank(self) -> int:
        """Which sample of a batch this rank works on."""
        return self.rank // self.shape.sequence

    @classmethod
    def over_bmtrain(cls, *, data: int | None = None, sequence: int | None = None) -> "Mesh":
        """Return the mesh over all ranks of a running BMTrain; every rank must call it.

        Raises:
            UserError: BMTrain was not started, the axes do not match the ranks, or the ranks ask for different axes.
        """
        return cls._over(*bmtrain_groups(), data, sequence)

    @classmethod
    def over_process_group(cls, *, data: int | None = None, sequence: int | None = None) -> "Mesh":
        """Return the mesh over all ranks of torch.distributed's default group; every rank must call it.

        Raises:
            UserError: `torch.distributed` was not initialised, the axes do not match the ranks, or the ranks ask for
                different axes.
        """
        return cls._over(*process_groups(), data, sequence)

    @classmethod
    def _over(cls, world: Checked, split: Split, data: int | None, sequence: int | None) -> "Mesh":
        def decide() -> tuple[MeshShape, str]:
            shape = MeshShape.fit(world.size, data, sequence)
            return shape, f"mesh of data {shape.data} x sequence {shape.sequence}"

        with world.checking():  # ranks that make different groups wait for each other for ever
            shape = world.decided(decide)
        return cls(shape, world.rank, world, split(shape.sequence_groups()), split(shape.data_groups()))

    def current(self) -> AbstractContextManager[None]:
        """Make this the mesh that functions use when no group is named, in this thread, until the block ends.

        `bmburst.recompute.checkpoint` calls again under the mesh of the first call. Other checkpointing may do it in
        autograd's own thread, where none is current: name the group there, or use `bmburst.BurstAttention`.
        """
        return using_mesh(self)

    def set_checks(self, active: bool) -> None:
        """Compare the ranks' calls on GPUs, or no longer do (unless BMBURST_CHECK=1); on CPUs they always are."""
        for comm in (self.world, self.sequence, self.data):
            comm.active = active or comm.always

    def sum(self, value: float) -> float:
        """Return the sum of `value` over all ranks; blocks the host."""
        (total,) = self.world.all_reduce(torch.tensor([value], dtype=torch.float64, device=self.world.device)).wait()
        return float(total.item())


def current_mesh() -> Mesh | None:
    """Return the mesh of the innermost `with mesh.current():`, or None."""
    return _current.get()


@contextmanager
def using_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Make `mesh` the current one, or None of them, until the block ends."""
    token = _current.set(mesh)
    try:
        yield
    finally:
        _current.reset(token)


_current: ContextVar[Mesh | None] = ContextVar("bmburst_mesh", default=None)
